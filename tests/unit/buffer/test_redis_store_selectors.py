"""Selectors: the order in which ready units are claimed, by priority, staleness and tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rlmq.buffer.store import Facts, RowRange
from rlmq.common.errors import UsageError

pytestmark = pytest.mark.timeout(60)
_SEEDS = 600
# Quantiles of the chi-square distribution at 1 - 1e-4, by degrees of freedom. Draws depend on the seeds only.
_CHI_SQUARE = {1: 15.1, 3: 21.1, 7: 29.9, 11: 37.4}


def _chi_square(seen, expected):
    """Pearson's statistic of counts against expected counts."""
    assert sum(seen.values()) == pytest.approx(sum(expected.values()))
    return sum((seen[key] - count) ** 2 / count for key, count in expected.items())


def _seeded(bench, table, rows, *, group_size=1):
    """(store, name) of one full table per seed; of some of them the invariants are looked at."""
    store = bench.store(table)
    for seed in range(_SEEDS):
        name = f"seed-{seed}"
        store.open([replace(table, name=name, seed=seed)])
        store.put(name, bench.rows(0, rows), producer="p", sequence=0, group_size=group_size)
        yield store, name
        if seed % 60 == 0:
            assert store.verify(name) == []
    bench.client.flushall()


def _draw(store, name, count=1):
    return store.claim(name, "end", max_rows=count, min_rows=count, columns=["x"])


def test_fresh_first_claims_the_newest_chunk_first(bench):
    store = bench.store(bench.one_stage(selector="fresh_first"))
    for _ in range(3):
        bench.put(store, 2)
    assert bench.xs(bench.take(store, "end", 3)) == [200, 201, 100]
    bench.put(store, 1)
    assert bench.xs(bench.take(store, "end", 4)) == [300, 101, 0, 1]


def test_uniform_draws_every_row_once_before_it_is_empty(bench):
    store = bench.store(bench.one_stage(selector="uniform"))
    bench.put(store, 8)
    bench.put(store, 8)
    drawn = [bench.xs(bench.take(store, "end", 1))[0] for _ in range(16)]
    assert sorted(drawn) == [*range(8), *range(100, 108)]
    assert drawn != sorted(drawn)
    assert store.claim("train", "end", max_rows=1) is None


def test_uniform_draws_every_row_equally_often(bench):
    seen = Counter()
    for store, name in _seeded(bench, bench.one_stage(selector="uniform"), 8):
        seen.update(bench.xs(_draw(store, name)))
    assert _chi_square(seen, dict.fromkeys(range(8), _SEEDS / 8)) < _CHI_SQUARE[7]


def test_uniform_draws_groups_that_come_in_one_claim_independently(bench):
    """Ordered pairs of different groups are equally likely."""
    seen = Counter()
    table = bench.one_stage(selector="uniform", scope="group")
    for store, name in _seeded(bench, table, 12, group_size=3):
        xs = bench.xs(_draw(store, name, 6))
        assert [x % 3 for x in xs] == [0, 1, 2] * 2
        seen[xs[0] // 3, xs[3] // 3] += 1
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    assert _chi_square(seen, dict.fromkeys(pairs, _SEEDS / 12)) < _CHI_SQUARE[11]


def test_a_row_that_comes_back_after_a_use_is_as_likely_as_any_other(bench):
    again = 0
    for store, name in _seeded(bench, bench.one_stage(selector="uniform", max_uses=2), 4):
        first = _draw(store, name)
        store.finish(first, "trained", step=0)
        again += bench.xs(_draw(store, name)) == bench.xs(first)
    seen = {True: again, False: _SEEDS - again}
    assert _chi_square(seen, {True: _SEEDS / 4, False: _SEEDS * 3 / 4}) < _CHI_SQUARE[1]


@pytest.mark.parametrize("selector", ["uniform", "prioritized"])
def test_a_seed_repeats_its_draws_and_another_one_does_not(bench, selector):
    orders = {}
    for name, seed in (("one", 7), ("same", 7), ("other", 8)):
        table = replace(bench.one_stage(selector=selector, seed=seed, max_uses=2), name=name)
        store = bench.store(table)
        store.put(name, bench.rows(0, 16), producer="p", sequence=0, group_size=1)
        orders[name] = []
        while (claim := _draw(store, name)) is not None:
            orders[name] += bench.xs(claim)
            store.finish(claim, "trained", step=0)
    assert sorted(orders["one"]) == sorted([*range(16)] * 2)
    assert orders["one"] == orders["same"]
    assert orders["one"] != orders["other"]


def test_prioritized_draws_in_proportion_to_the_rates(bench):
    rates = {0: 1.0, 1: 2.0, 2: 4.0, 3: 9.0}
    seen = Counter()
    for store, name in _seeded(bench, bench.one_stage(selector="prioritized"), 4):
        store.prioritize(name, "end", [RowRange("p.0", k, 1) for k in rates], list(rates.values()))
        seen.update(bench.xs(_draw(store, name)))
    total = sum(rates.values())
    assert _chi_square(seen, {k: _SEEDS * rate / total for k, rate in rates.items()}) < _CHI_SQUARE[3]


def test_rates_that_are_set_while_a_row_is_leased_count_when_it_comes_back(bench):
    rates = {0: 1.0, 1: 2.0, 2: 4.0, 3: 9.0}
    seen = Counter()
    for store, name in _seeded(bench, bench.one_stage(selector="prioritized", max_uses=2), 4):
        claim = _draw(store, name, 4)
        store.prioritize(name, "end", [RowRange("p.0", k, 1) for k in rates], list(rates.values()))
        store.finish(claim, "trained", step=0)
        seen.update(bench.xs(_draw(store, name)))
    total = sum(rates.values())
    assert _chi_square(seen, {k: _SEEDS * rate / total for k, rate in rates.items()}) < _CHI_SQUARE[3]


def test_rates_that_are_set_between_two_draws_hold_for_the_second(bench):
    """What was not drawn yet has no better or worse odds for having waited."""
    fast = 0
    for store, name in _seeded(bench, bench.one_stage(selector="prioritized"), 8):
        drawn = bench.xs(_draw(store, name, 6))
        left = sorted({*range(8)} - {*drawn})
        store.prioritize(name, "end", [RowRange("p.0", x, 1) for x in left], [1.0, 3.0])
        fast += bench.xs(_draw(store, name)) == [left[1]]
    seen = {True: fast, False: _SEEDS - fast}
    assert _chi_square(seen, {True: _SEEDS * 3 / 4, False: _SEEDS / 4}) < _CHI_SQUARE[1]


def test_prioritize_moves_a_ready_row_to_the_front(bench):
    store = bench.store(bench.one_stage(selector="prioritized"))
    bench.put(store, 16)
    for row in (11, 3):
        store.prioritize("train", "end", [RowRange("p.0", row, 1)], [1e12])
        assert bench.xs(bench.take(store, "end", 1)) == [row]


def test_prioritize_of_one_range_gives_all_of_its_units_the_rate(bench):
    store = bench.store(bench.one_stage(selector="prioritized", scope="group"))
    bench.put(store, 16, group_size=4)
    store.prioritize("train", "end", [RowRange("p.0", 4, 8)], [1e12])
    assert sorted(bench.xs(bench.take(store, "end", 8))) == [*range(4, 12)]


def test_prioritized_never_splits_a_group(bench):
    store = bench.store(bench.one_stage(selector="prioritized", scope="group"))
    bench.put(store, 12, group_size=4)
    for _ in range(3):
        claim = store.claim("train", "end", max_rows=7)
        assert claim.count == 4
        assert {x // 4 for x in bench.xs(claim)} == {bench.xs(claim)[0] // 4}


def test_a_part_of_a_unit_cannot_be_prioritized(bench):
    store = bench.store(bench.one_stage(selector="prioritized", scope="group"))
    bench.put(store, 8, group_size=4)
    for first, count in ((0, 2), (2, 4), (0, 6)):
        with pytest.raises(UsageError, match=r"a part of a unit of chunk 'p\.0'.*whole units"):
            store.prioritize("train", "end", [RowRange("p.0", first, count)], [2.0])


def test_rows_that_a_chunk_does_not_have_cannot_be_prioritized(bench):
    store = bench.store(bench.one_stage(selector="prioritized"))
    bench.put(store, 2)
    with pytest.raises(UsageError, match=r"chunk 'p\.0'.*whole units"):
        store.prioritize("train", "end", [RowRange("p.0", 1, 2)], [2.0])
    assert bench.key_names("priority") == []


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_positive_and_finite(bench, rate):
    store = bench.store(bench.one_stage(selector="prioritized"))
    bench.put(store, 1)
    with pytest.raises(UsageError, match="one positive finite rate for each range"):
        store.prioritize("train", "end", [RowRange("p.0", 0, 1)], [rate])


def test_only_a_prioritized_stage_can_be_prioritized(bench):
    store = bench.store(bench.one_stage(selector="uniform"))
    bench.put(store, 1)
    with pytest.raises(UsageError, match=r"stage 'end'.*got uniform.*a prioritized stage"):
        store.prioritize("train", "end", [RowRange("p.0", 0, 1)], [2.0])


def test_the_rate_of_a_freed_row_is_left_alone(bench):
    store = bench.store(bench.one_stage(selector="prioritized"))
    bench.put(store, 2)
    store.prioritize("train", "end", [RowRange("p.0", 0, 2)], [3.0])
    store.finish(bench.take(store, "end", 2), "done")
    store.prioritize("train", "end", [RowRange("p.0", 0, 2)], [5.0])
    assert bench.key_names("priority") == []


def test_rows_beyond_the_staleness_end_when_the_trainer_tells_its_version(bench):
    store = bench.store(bench.one_stage(max_staleness=2))
    for version in (4, 5, 6):
        bench.put(store, 2, version=version)
    assert bench.xs(store.claim("train", "end", max_rows=9, version=7)) == [100, 101, 200, 201]
    counts = store.counts("train")
    assert (counts.ended, counts.live) == ({"stale(3 versions old)": 2}, 4)


def test_a_claim_without_a_version_ends_nothing(bench):
    store = bench.store(bench.one_stage(max_staleness=0))
    bench.put(store, 2, version=1)
    store.set_version("train", 9)
    assert bench.take(store, "end", 2).count == 2
    assert store.counts("train").ended == {}


def test_rows_of_unknown_version_are_never_stale(bench):
    store = bench.store(bench.one_stage(max_staleness=0))
    bench.put(store, 2)
    assert store.claim("train", "end", max_rows=2, version=100).count == 2


def test_one_stale_member_ends_its_whole_group(bench):
    table = bench.with_stage(bench.table(b="group"), "b", max_staleness=1)
    store = bench.store(table)
    bench.put(store, 4, group_size=2)
    for version in (3, 5, 5, 5):  # rows 0 to 3
        claim = bench.take(store, "a", 1)
        store.write(claim, bench.y([0]), ack=True, facts=Facts(version=version))
    assert bench.xs(store.claim("train", "b", max_rows=4, version=5)) == [2, 3]
    assert store.counts("train").ended == {"stale(2 versions old)": 2}
    ended = bench.take(store, "recorder", 2, columns=["x", "end_state", "end_reason"]).rows.to_pylist()
    assert ended == [{"x": x, "end_state": "stale", "end_reason": "2 versions old"} for x in (0, 1)]


def test_the_oldest_version_of_several_writers_counts(bench):
    store = bench.store(bench.one_stage(max_staleness=3))
    bench.put(store, 1, version=5)
    claim = bench.take(store, "end", 1)
    store.write(claim, bench.y([0]), facts=Facts(version=2))
    store.write(claim, bench.y([0]), facts=Facts(version=9))
    store.release(claim)
    assert store.claim("train", "end", max_rows=1, version=6) is None
    assert store.counts("train").ended == {"stale(4 versions old)": 1}


def test_stale_rows_do_not_count_for_a_claim_that_ends_them(bench):
    store = bench.store(bench.one_stage(max_staleness=1))
    bench.put(store, 3, version=0)
    bench.put(store, 1, version=5)
    assert store.claim("train", "end", max_rows=4, min_rows=2, version=5) is None
    assert (store.counts("train").ready["end"], store.counts("train").live) == (1, 1)


def test_a_claim_never_takes_more_than_its_tokens(bench):
    store = bench.store(bench.one_stage())
    bench.put(store, 6, tokens=[10, 20, 30, 5, 5, 5])
    assert bench.xs(store.claim("train", "end", max_rows=6, max_tokens=59)) == [0, 1]
    assert bench.xs(store.claim("train", "end", max_rows=6, max_tokens=45)) == [2, 3, 4, 5]


def test_tokens_are_counted_across_chunks(bench):
    store = bench.store(bench.one_stage())
    for _ in range(3):
        bench.put(store, 2, tokens=[8, 8])
    assert bench.xs(store.claim("train", "end", max_rows=6, max_tokens=40)) == [0, 1, 100, 101, 200]


def test_one_row_is_taken_even_when_it_alone_is_over_the_budget(bench):
    store = bench.store(bench.one_stage())
    bench.put(store, 3, tokens=[50, 1, 1])
    assert bench.xs(store.claim("train", "end", max_rows=3, max_tokens=10)) == [0]
    assert bench.xs(store.claim("train", "end", max_rows=3, max_tokens=10)) == [1, 2]


@pytest.mark.parametrize("selector", ["fifo", "uniform"])
def test_a_token_budget_keeps_groups_whole(bench, selector):
    store = bench.store(bench.one_stage(scope="group", selector=selector))
    bench.put(store, 6, group_size=2, tokens=[10, 11] * 3)
    for budget, groups in ((20, 1), (42, 2)):
        claim = store.claim("train", "end", max_rows=6, max_tokens=budget)
        assert claim.count == 2 * groups
        assert sorted(Counter(x // 2 for x in bench.xs(claim)).values()) == [2] * groups


def test_a_row_of_unknown_size_counts_nothing(bench):
    store = bench.store(bench.one_stage())
    bench.put(store, 2)
    bench.put(store, 2, tokens=[7, 7])
    assert bench.xs(store.claim("train", "end", max_rows=4, max_tokens=7)) == [0, 1, 100]


def test_sizes_that_come_with_a_write_count_from_then_on(bench):
    store = bench.store()
    bench.put(store, 4)
    for tokens in ([9, 9], [3, 3]):
        claim = bench.take(store, "a", 2)
        store.write(claim, bench.y([0, 0]), ack=True, facts=Facts(tokens=tokens))
    assert bench.xs(store.claim("train", "b", max_rows=4, max_tokens=21)) == [0, 1, 2]


def test_tokens_of_another_number_of_rows_are_refused(bench):
    store = bench.store()
    with pytest.raises(UsageError, match=r"tokens of rows.*3 counts.*expected 2"):
        bench.put(store, 2, tokens=[1, 2, 3])

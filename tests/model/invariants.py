"""The buffer's invariants by name. A broken one raises `Broken`, whose message starts with that name."""

from __future__ import annotations

INVARIANTS = {
    "no_double_lease": "no row is leased twice at once by one stage",
    "only_ready": "a row is ready for a stage when it lives and has every column that the stage needs",
    "group_whole": "a unit becomes ready, and is claimed, with all of its live members",
    "claim_bounds": "a claim keeps max_rows, min_rows, max_tokens, min_batch, min_size and samples_per_insert",
    "ready_is_given": "a row that can be worked on is ready, and a claim that can be met is met",
    "flush_flushes": "rows of a closed or overdue batch do not wait for min_batch",
    "fifo_order": "rows come by admission of their chunk, or the newest chunk first",
    "priority_draws": "a unit of an overwhelming rate is drawn before the others",
    "redelivery": "rows that are given back are delivered again, counted unless they were released",
    "delivery_counted": "a claim tells how often a row was delivered, and how often it was used",
    "payload_intact": "a row reads back as it was written, for as long as it is held",
    "lease_fences": "a call under a lease that is over is refused, counted, and changes nothing",
    "leases_agree": "the live leases are those that were claimed and not ended",
    "put_once": "a repeated put is a no-op, and says so",
    "capacity_bound": "a put is refused exactly while a limit of the table is reached",
    "counts_agree": "the counters say what the rows say",
    "ended_counted": "the counters of end states say how rows ended",
    "one_end_state": "every admitted row is in exactly one end state, and the recorder gets it once",
    "uses_bounded": "a training counts once, and no row is trained on more often than max_uses",
    "staleness_bound": "a trainer gets no row beyond max_staleness",
    "dead_letters_kept": "a dead row keeps its reason and payload until it is retried, dropped or too old",
    "held_while_needed": "payload is held while a row of its chunk needs it",
    "freed_when_over": "payload is freed with the last row of its chunk, and no key outlives the rows",
    "waiter_wakes": "who sleeps on a claim or a put wakes when it can be met",
    "rows_stay": "rows, leases and counters outlive the server's process",
    "verify_agrees": "the store's own check finds nothing",
}


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, detail: object) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {INVARIANTS[invariant]}: {detail}")


def holds(invariant: str, condition: bool, detail: object = "") -> None:
    """Raise `Broken` unless the condition holds."""
    if not condition:
        raise Broken(invariant, detail)


def equal(invariant: str, got: object, expected: object, what: str = "") -> None:
    """Raise `Broken` unless both are equal."""
    if got != expected:
        raise Broken(invariant, f"{what} got {got}, expected {expected}")

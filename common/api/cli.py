"""The command `rlmq`. Commands import what they need when they run: `rlmq --help` imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlmq.cli_errors import ends_in_one_message

app = typer.Typer(
    name="rlmq",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RL post-training of language models in processes that can be killed and restarted one by one.\n\n"
    "Exit codes: 0 done, 2 usage, 3 dependency, 4 second controller, 5 deadline, 6 integrity, 75 restart, "
    "130 interrupted, 143 terminated.",
)

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace the recipe's.", show_default=False),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="FOLDER", help="The run's folder; default: the newest run of the recipe's name."),
]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Run id, name or folder; default: the newest.")
]
RunAndValues = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN] [KEY=VALUE]...", help="The run (default: the newest), and values of its recipe."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
RunsFolder = Annotated[Path, typer.Option("--folder", help="Folder that holds the runs.")]
_RUNS = Path("runs")
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the order has its effect.")]
Within = Annotated[
    float, typer.Option("--within", min=0, metavar="SECONDS", help="How long to wait for it; then exit 5.")
]
Letters = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN] ID", help="The run (default: the newest), and ids of `rlmq dead list`."),
]
Every = Annotated[bool, typer.Option("--all", help="All dead letters of the run.")]

dead = typer.Typer(no_args_is_help=True, help="Dead letters: rows that ended as dead and are still held.")
app.add_typer(dead, name="dead")
node = typer.Typer(no_args_is_help=True, help="Nodes that join a run while it goes on.")
app.add_typer(node, name="node")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from rlmq import __version__

        print(f"rlmq {__version__}")
        raise typer.Exit


@app.command()
@ends_in_one_message
def up(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run instead of continuing.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what each process would read, and start nothing.")
    ] = False,
) -> int:
    """Start, supervise and end all processes of a run on this machine.

    The same command continues an unfinished run of the same name.
    """
    from rlmq.cli_up import up_command

    return up_command(recipe, overrides or [], fresh=fresh, dry_run=dry_run)


@app.command()
@ends_in_one_message
def check(recipe: RecipeArgument, overrides: Overrides = None) -> int:
    """Check a recipe and what it names: data, model, reward functions."""
    from rlmq.cli_check import check_command

    return check_command(recipe, overrides or [])


@app.command()
@ends_in_one_message
def controller(recipe: RecipeArgument, overrides: Overrides = None, run: RunOption = None) -> int:
    """Run the controller of a run: the process that steers."""
    from rlmq.cli_process import controller_command

    return controller_command(recipe, overrides or [], run)


@app.command()
@ends_in_one_message
def worker(
    role: Annotated[
        str,
        typer.Argument(
            metavar="ROLE",
            help="prompts, rollout, reward, reference, critic, actor, recorder, a node; or with index: rollout-1.",
        ),
    ],
    recipe: RecipeArgument,
    overrides: Overrides = None,
    index: Annotated[int, typer.Option("--index", min=0, envvar="RANK", help="Which worker of the role.")] = 0,
    run: RunOption = None,
) -> int:
    """Run one worker of a run."""
    from rlmq.cli_process import worker_command

    return worker_command(role, index, recipe, overrides or [], run)


@app.command()
@ends_in_one_message
def samples(
    run: RunArgument = None,
    step: Annotated[int | None, typer.Option("--step", help="Training step; default: the newest.")] = None,
    table: Annotated[str, typer.Option("--table", help="train or eval.")] = "train",
    best: Annotated[int, typer.Option("--best", min=0, help="Samples with the greatest reward.")] = 3,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Samples with the least reward.")] = 3,
    random: Annotated[int, typer.Option("--random", min=0, help="Samples drawn at random.")] = 3,
    where: Annotated[
        str | None, typer.Option("--where", help='Only these, by SQL: "truncated and reward < 0.5" (DuckDB).')
    ] = None,
    ratio: Annotated[
        bool, typer.Option("--ratio", help="Colour tokens by how much likelier the newest checkpoint makes them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Show best, worst and random samples of a step."""
    from rlmq.cli_read import samples_command

    return samples_command(
        run,
        folder=folder,
        step=step,
        table=table,
        best=best,
        worst=worst,
        random=random,
        as_json=as_json,
        where=where,
        ratio=ratio,
    )


@app.command()
@ends_in_one_message
def replay(
    words: RunAndValues = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="This step; default: every step.")] = None,
    loss: Annotated[
        str | None, typer.Option("--loss", help="Another loss: an algorithm's name, or file.py:function.")
    ] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="Another reward, file.py:function.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option("--max-staleness", min=0, help="Leave rows out that are older, in versions.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per step.")] = False,
    rank: Annotated[int, typer.Option("--rank", hidden=True)] = 0,
    meet: Annotated[Path | None, typer.Option("--meet", hidden=True)] = None,
    folder: RunsFolder = _RUNS,
) -> int:
    """Make steps of a run again from its checkpoints, batch log and recording, and compare them with the run.

    With another loss, reward, staleness or KEY=VALUE: the same step by both methods, side by side. Exit 6: a step
    of a deterministic run came out otherwise; the first tensor that differs is named.
    """
    from rlmq.cli_replay import replay_command

    return replay_command(
        words or [],
        folder=folder,
        step=step,
        loss=loss,
        reward=reward,
        max_staleness=max_staleness,
        as_json=as_json,
        rank=rank,
        meet=meet,
    )


@app.command("train-offline")
@ends_in_one_message
def train_offline(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECORDING... RECIPE [KEY=VALUE]...",
            help="Runs, or places of recordings (each may end with :WEIGHT); a recipe; values that replace its.",
            show_default=False,
        ),
    ],
    order: Annotated[
        str, typer.Option("--order", help="groups: in the order of the data; steps: as the recorded run's steps.")
    ] = "groups",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run instead of continuing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what each process would read.")] = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Train on recordings by any algorithm: no rollout workers, no rewards are computed.

    The run is called NAME-offline. With --order steps and the recipe of the recorded run, it ends with its weights.
    """
    from rlmq.cli_offline import offline_command

    return offline_command(words, folder=folder, order=order, fresh=fresh, dry_run=dry_run)


@app.command()
@ends_in_one_message
def show(
    words: Annotated[
        list[str], typer.Argument(metavar="[RUN] SAMPLE", help="The run (default: the newest), and a sample's id.")
    ],
    as_json: Json = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Follow one sample: who wrote what of it, when, with which version, call, seed and reward, and its step."""
    from rlmq.cli_show import show_command

    return show_command(words, folder=folder, as_json=as_json)


@app.command()
@ends_in_one_message
def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="SQL over train, eval, … and metrics.")],
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Default: the newest.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Also the table live: rows that the server of a live run holds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Ask the recordings and figures of runs by SQL (DuckDB, the extra `analysis`)."""
    from rlmq.cli_sql import sql_command

    return sql_command(query, runs or [], folder=folder, live=live, as_json=as_json)


@app.command()
@ends_in_one_message
def diff(
    first: Annotated[str, typer.Argument(metavar="RUN")],
    second: Annotated[str, typer.Argument(metavar="RUN")],
    as_json: Json = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Compare two runs: their recipes, the first step that differs and what of it, their last figures."""
    from rlmq.cli_compare import diff_command

    return diff_command(first, second, folder=folder, as_json=as_json)


@app.command()
@ends_in_one_message
def report(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs to be compared; default: the newest.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: report.html of the first run.")
    ] = None,
    folder: RunsFolder = _RUNS,
) -> int:
    """Write one HTML file: curves, lengths, what each process did, samples, failures.

    Runs that differ in their seed alone are drawn as their mean with a band of 95 %.
    """
    from rlmq.cli_compare import report_command

    return report_command(runs or [], folder=folder, output=output)


@app.command()
@ends_in_one_message
def sweep(
    recipe: RecipeArgument,
    axes: Annotated[
        list[str],
        typer.Argument(metavar="KEY=A,B,C...", help="Values to be tried; several keys: all combinations."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The report; default: in the runs' folder."),
    ] = None,
) -> int:
    """Make a run for each combination of values, then one report of all.

    The same command goes on where it was stopped.
    """
    from rlmq.cli_compare import sweep_command

    return sweep_command(recipe, axes, output=output)


@app.command()
@ends_in_one_message
def rescore(
    words: RunAndValues = None,
    reward: Annotated[str | None, typer.Option("--reward", help="The new reward, file.py:function.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Samples of this step; default: all.")] = None,
    table: Annotated[str, typer.Option("--table", help="train or eval.")] = "train",
    to: Annotated[
        str | None, typer.Option("--to", metavar="PLACE", help="Write a recording with the new rewards there.")
    ] = None,
    show: Annotated[int, typer.Option("--show", min=0, help="Samples whose reward changes most.")] = 5,
    as_json: Json = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Score recorded samples by another reward, or by changed KEY=VALUEs, and compare it with the recorded one."""
    from rlmq.cli_rescore import rescore_command

    return rescore_command(
        words or [], folder=folder, reward=reward, step=step, table=table, to=to, show=show, as_json=as_json
    )


@app.command()
@ends_in_one_message
def buffer(
    run: RunArgument = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every invariant; exit 6 when one is broken.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Show what the buffer of a live run holds: limits, rows by stage, leases, ends, who waits."""
    from rlmq.cli_buffer import buffer_command

    return buffer_command(run, folder=folder, verify=verify, as_json=as_json)


@app.command()
@ends_in_one_message
def why(run: RunArgument = None, as_json: Json = False, folder: RunsFolder = _RUNS) -> int:
    """Say who waits for what in a run, and name the process that everything waits for.

    Also of a run that is over. Exit 0 whenever it could tell.
    """
    from rlmq.cli_why import why_command

    return why_command(run, folder=folder, as_json=as_json)


@app.command()
@ends_in_one_message
def status(run: RunArgument = None, as_json: Json = False, folder: RunsFolder = _RUNS) -> int:
    """Show what a run does now, or how it ended: phase, step, workers, restarts, rows, open orders.

    Exit 0: it is up, or ended well. 3: it is neither up nor ended. Else the exit code with which it ended.
    """
    from rlmq.cli_status import status_command

    return status_command(run, folder=folder, as_json=as_json)


@app.command()
@ends_in_one_message
def log(
    run: RunArgument = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only this training step.")] = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="NAME", help="Only this process, for example rollout-0.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run has ended.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The records themselves, one JSON object per line.")
    ] = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Tell what happened in a run: calls, workers that came and went, restarts, orders, by time."""
    from rlmq.cli_log import log_command

    return log_command(run, folder=folder, step=step, worker=worker, follow=follow, as_json=as_json)


@app.command("set")
@ends_in_one_message
def set_(
    words: Annotated[
        list[str], typer.Argument(metavar="[RUN] KEY=VALUE...", help="The run (default: the newest), and values.")
    ],
    wait: Wait = True,
    within_s: Within = 60.0,
    folder: RunsFolder = _RUNS,
) -> int:
    """Change values of a live run, from its next step on.

    Keys: reward.NAME.weight, checkpoint.every_steps, evaluate.every_steps, deadlines.step_s, train.steps.
    """
    from rlmq.cli_orders import set_command

    return set_command(words, folder=folder, wait=wait, within_s=within_s)


@app.command()
@ends_in_one_message
def pause(run: RunArgument = None, wait: Wait = True, within_s: Within = 60.0, folder: RunsFolder = _RUNS) -> int:
    """Let the workers of a live run finish what they hold and then wait, until `rlmq resume`."""
    from rlmq.cli_orders import order_command

    return order_command("pause", run, folder=folder, wait=wait, within_s=within_s)


@app.command()
@ends_in_one_message
def resume(run: RunArgument = None, wait: Wait = True, within_s: Within = 60.0, folder: RunsFolder = _RUNS) -> int:
    """Let a paused run go on."""
    from rlmq.cli_orders import order_command

    return order_command("resume", run, folder=folder, wait=wait, within_s=within_s)


@app.command()
@ends_in_one_message
def drain(run: RunArgument = None, wait: Wait = True, within_s: Within = 600.0, folder: RunsFolder = _RUNS) -> int:
    """Let a live run finish its open step, save a checkpoint and end; the same command continues it."""
    from rlmq.cli_orders import order_command

    return order_command("drain", run, folder=folder, wait=wait, within_s=within_s)


@app.command()
@ends_in_one_message
def stop(run: RunArgument = None, wait: Wait = True, within_s: Within = 60.0, folder: RunsFolder = _RUNS) -> int:
    """End a live run now, as SIGTERM does; the same command continues it."""
    from rlmq.cli_orders import order_command

    return order_command("stop", run, folder=folder, wait=wait, within_s=within_s)


@app.command()
@ends_in_one_message
def remap(
    words: Annotated[
        list[str], typer.Argument(metavar="[RUN] ROLE KEY=VALUE...", help="Keys of placement.ROLE: devices=[0,1].")
    ],
    within_s: Within = 600.0,
    folder: RunsFolder = _RUNS,
) -> int:
    """Drain a live run and go on with a role on other devices, or with another strategy; here, in this terminal."""
    from rlmq.cli_remap import remap_command

    return remap_command(words, folder=folder, within_s=within_s)


@node.command("add")
@ends_in_one_message
def node_add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML with one item of a recipe's `nodes`.")],
    run: RunArgument = None,
    folder: RunsFolder = _RUNS,
) -> int:
    """Let a node see the rows of a live run that end from now on."""
    from rlmq.cli_node import node_add_command

    return node_add_command(file, run, folder=folder)


@dead.command("list")
@ends_in_one_message
def dead_list(
    run: RunArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """List the dead letters of a live run."""
    from rlmq.cli_dead import dead_list_command

    return dead_list_command(run, folder=folder, as_json=as_json)


@dead.command("show")
@ends_in_one_message
def dead_show(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[RUN] ID", help="The run (default: the newest), and an id of `rlmq dead list`."),
    ],
    rows: Annotated[int, typer.Option("--rows", min=0, help="So many rows with their text.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with the text of all rows.")] = False,
    folder: RunsFolder = _RUNS,
) -> int:
    """Show one dead letter: the whole reason, and the text of its rows."""
    from rlmq.cli_dead import dead_show_command

    return dead_show_command(words, folder=folder, rows=rows, as_json=as_json)


@dead.command("retry")
@ends_in_one_message
def dead_retry(words: Letters = None, every: Every = False, folder: RunsFolder = _RUNS) -> int:
    """Make dead rows ready again for the stage that lost them."""
    from rlmq.cli_dead import dead_retry_command

    return dead_retry_command(words or [], folder=folder, every=every)


@dead.command("drop")
@ends_in_one_message
def dead_drop(words: Letters = None, every: Every = False, folder: RunsFolder = _RUNS) -> int:
    """Let go of dead rows; they stay counted as dead."""
    from rlmq.cli_dead import dead_drop_command

    return dead_drop_command(words or [], folder=folder, every=every)


@app.command(context_settings={"ignore_unknown_options": True})
@ends_in_one_message
def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The benchmark; none lists them.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own options; `-- --help` lists them.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> int:
    """Run a benchmark of the checkout."""
    from rlmq.cli_read import bench_command

    return bench_command(name, arguments or [], json_file=json_file, markdown=markdown)


@app.command()
@ends_in_one_message
def keys(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the keys lie.")] = Path("keys"),
    role: Annotated[
        str | None, typer.Option("--role", help="Make this pair anew: a role, a node, controller or operator.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Make pairs for its nodes too.")] = None,
) -> int:
    """Make the keys of the control plane that are missing, and say which machine needs which."""
    from rlmq.cli_keys import keys_command

    return keys_command(folder, role, recipe)


@app.command()
@ends_in_one_message
def deploy(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="systemd or compose.")],
    recipe: RecipeArgument,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the files.")] = Path(
        "deployment"
    ),
) -> int:
    """Write the files that run a recipe under systemd or Docker Compose."""
    from rlmq.cli_deploy import deploy_command

    return deploy_command(kind, recipe, overrides or [], output)


@app.command()
@ends_in_one_message
def draw(
    flow: Annotated[
        str, typer.Argument(metavar="FLOW", help="A recipe, or a script with a DataFlow (my.py, my.py:flow).")
    ],
    overrides: Overrides = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw it there instead.")] = None,
) -> int:
    """Draw the flow of a recipe or of a script: its nodes, and which columns they hand on."""
    from rlmq.cli_draw import draw_command

    return draw_command(flow, overrides or [], svg)


@app.command()
@ends_in_one_message
def simulate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="Devices.")] = 8,
    lengths: Annotated[
        str, typer.Option("--lengths", help="JSON list of response lengths (FILE or FILE#NAME), or a run's folder.")
    ] = "",
    steps: Annotated[
        int, typer.Option("--steps", min=3, help="Steps to simulate; the first two are not counted.")
    ] = 12,
    sync_s: Annotated[float, typer.Option("--sync-s", min=0, help="Seconds of a weight sync.")] = 0.0,
) -> int:
    """Predict the time of a step for each schedule, on devices that are not here."""
    from rlmq.cli_simulate import simulate_command

    return simulate_command(recipe, overrides or [], devices=gpus, lengths=lengths, steps=steps, sync_s=sync_s)


@app.command()
@ends_in_one_message
def algorithms() -> int:
    """List the algorithms."""
    from rlmq.cli_read import algorithms_command

    return algorithms_command()


def main() -> None:
    """Entry point."""
    try:
        app()
    except KeyboardInterrupt:  # before or after the command itself
        sys.exit(130)


if __name__ == "__main__":
    main()

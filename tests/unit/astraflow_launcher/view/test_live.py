"""What a person sees: on a terminal, and as lines."""

import io
import math

from rich.console import Console

from astraflow.dataflow.v1 import account_pb2, version_pb2
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.trainer.v1 import trainer_service_pb2 as trainers
from astraflow_launcher.view.live import LineView, render
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.totals import StepPoint
from support.observations import evaluation
from support.printed import printed


def _observation() -> Observation:
    wait = admin.Wait(stage="batch", reason="ready_groups", detail="12 of 16 groups are ready")
    return Observation(
        seconds=10.0,
        status=admin.StatusResponse(
            policies=[admin.PolicyStatus(policy_id="solver")],
            nodes=[admin.NodeStatus(node_id="node-1", tokens=77, connected=True, waiting_for="weights")],
            trajectories=account_pb2.TrajectoryAccount(ingested=50, trained=40),
            waits=[wait],
        ),
        trainers={"solver": trainers.StatusResponse(phase=trainers.PHASE_STARTING, progress=0.4)},
        versions={"solver": [version_pb2.Version(version=3, delta_bytes=64_000, density=0.05)]},
        steps=[StepPoint("solver", 1, 9.0, {"reward_mean": 0.5})],
    )


def _text(observation: Observation) -> str:
    return printed(render(observation, title="run", doing="running"), width=140)


def _lines() -> tuple[LineView, io.StringIO, Observation]:
    """A view of lines, what it writes, and what it is shown."""
    output = io.StringIO()
    return LineView(Console(file=output, width=200)), output, _observation()


def test_the_view_names_what_the_run_waits_for() -> None:
    text = _text(_observation())
    expected = ("12 of 16 groups are ready", "waits: weights", "starting 40%")
    expected += ("version 3", "64 kB", "50 arrived = 40 trained")
    assert [words for words in expected if words not in text] == []


def test_the_view_says_where_the_server_is() -> None:
    observation = _observation()
    observation.server = "dataflow server: --join 127.0.0.1:7070, http://127.0.0.1:7071/status"
    assert "--join 127.0.0.1:7070" in _text(observation)
    view, output, _ = _lines()
    for _ in range(2):
        view.show(observation, doing="running")
    assert output.getvalue().count("--join 127.0.0.1:7070") == 1


def test_the_view_of_nothing_says_that_it_starts() -> None:
    assert "dataflow: starting" in _text(Observation())


def test_a_daemon_that_does_not_answer_is_shown() -> None:
    observation = _observation()
    observation.unreachable["node-1"] = "connection refused"
    assert "node-1 does not answer: connection refused" in _text(observation)


def test_lines_tell_each_step_and_evaluation_once() -> None:
    view, output, observation = _lines()
    assert observation.status is not None
    observation.status.evaluations.append(evaluation(0, 0.25, num_samples=8))
    for _ in range(2):
        view.show(observation, doing="running")
    lines = output.getvalue().splitlines()
    assert [line.split("s  ", 1)[1][:12] for line in lines] == ["running", "solver step ", "solver evalu"]


def test_a_long_evaluation_is_told_as_it_goes_on() -> None:
    view, output, observation = _lines()
    assert observation.status is not None
    item = admin.Evaluation(policy_id="solver", evaluation_id="e", version=3, num_planned=90)
    observation.status.evaluations.append(item)
    for seconds, done in ((10, 0), (29, 20), (30, 30), (49, 40), (50, 60)):
        observation.seconds, observation.status.evaluations[0].num_samples = float(seconds), done
        view.show(observation, doing="running")
    told = [line.split("s  ", 1)[1] for line in output.getvalue().splitlines() if "evaluates" in line]
    assert told == [f"solver evaluates version 3: {done} of 90 samples" for done in (30, 60)]
    assert "60 of 90 samples" in _text(observation)


def test_each_restart_of_a_child_is_told_with_how_it_had_ended() -> None:
    view, output, observation = _lines()
    for count in (0, 1, 1, 2):
        observation.restarts, observation.ends = (
            {"node-1": count},
            {"node-1": "status 75: UNAVAILABLE, no hub"},
        )
        view.show(observation, doing="running")
    told = [line for line in output.getvalue().splitlines() if "RESTARTED" in line]
    assert len(told) == 2
    assert "RESTARTED node-1 (2), it ended with status 75: UNAVAILABLE, no hub" in told[1]
    assert "RESTARTED node-1 (2)" in _text(observation)


def test_an_evaluation_that_the_end_of_a_run_cut_off_has_no_mean() -> None:
    view, output, observation = _lines()
    assert observation.status is not None
    observation.status.evaluations.append(evaluation(50, math.nan, num_samples=0))
    view.show(observation, doing="running")
    assert "evaluation of version 50: closed before a sample was graded" in output.getvalue()
    assert "nan" not in output.getvalue()


def test_a_damaged_checkpoint_is_said_with_the_first_step_after_it() -> None:
    view, output, observation = _lines()
    observation.steps.append(StepPoint("solver", 2, 9.0, {"reward_mean": 0.5, "damaged_checkpoints": 1.0}))
    view.show(observation, doing="running")
    for text in (output.getvalue(), _text(observation)):
        assert text.count("DAMAGED: 1 newer checkpoint(s) were put aside") == 1


def test_each_kind_of_failure_is_told_once_with_its_place_and_so_is_the_stop() -> None:
    lines, stream, observation = _lines()
    assert observation.status is not None
    told = {"reason": "reward_error", "detail": "KeyError: 'a' (recipe.py:9 in f)", "node_id": "node-1"}
    failure = observation.status.failures.add(task_id="train-3", count=1, in_a_row=1, **told)  # type: ignore[arg-type]
    lines.show(observation, doing="running")
    failure.count = failure.in_a_row = 100
    observation.status.stopped_for = "tasks failed alike"
    lines.show(observation, doing="running")
    lines.show(observation, doing="running")
    said = stream.getvalue()
    assert said.count("FAILED reward_error: KeyError: 'a' (recipe.py:9 in f)") == 1
    assert said.count("STOPPED tasks failed alike") == 1
    assert "stopped: tasks failed alike" in _text(observation)
    assert "100 times, 100 in a row; first: task train-3 on node-1" in _text(observation)


def test_a_skipped_step_is_marked_and_counted() -> None:
    lines, stream, observation = _lines()
    observation.steps.append(StepPoint("solver", 2, 2.0, {"skipped": 1.0, "skipped_no_signal": 1.0}))
    lines.show(observation, doing="running")
    assert stream.getvalue().count("skipped: no signal") == 1
    assert "(1 skipped)" in _text(observation)


def test_what_is_wrong_is_told_at_once_with_its_remedy_and_its_end_and_told_again_when_it_comes_back() -> (
    None
):
    view, output, observation = _lines()
    missing = admin.Wait(
        stage="publish",
        policy_id="solver",
        reason="store_missing",
        detail="/mnt is not mounted",
        released_by="mount it",
    )
    for waits in ([missing], [missing], [], [missing]):
        del observation.status.waits[:]
        observation.status.waits.extend(waits)
        view.show(observation, doing="running")
    said = output.getvalue()
    assert said.count("solver publish waits: store_missing — /mnt is not mounted; next: mount it") == 2, said
    assert said.count("solver publish waits: store_missing: over") == 1
    assert "store_missing" in _text(observation)


def test_a_process_that_stands_still_is_told_once_and_so_is_its_end() -> None:
    view, output, observation = _lines()
    for silent_s in (5, 6):
        observation.silent = {"node-1": f"alive, and has answered nothing for {silent_s} s"}
        view.show(observation, doing="running")
    observation.silent = {}
    view.show(observation, doing="running")
    view.show(observation, doing="running")
    told = [line.split("s  ", 1)[1] for line in output.getvalue().splitlines() if "node-1 does not" in line]
    assert told == [
        "node-1 does not answer: alive, and has answered nothing for 5 s",
        "node-1 does not answer: over",
    ]


def test_a_long_start_is_told_again_as_it_goes_on() -> None:
    view, output, observation = _lines()
    for done in (0.1, 0.2, 0.4, 0.5, 0.9):
        del observation.status.waits[:]
        wait = observation.status.waits.add(
            stage="batch", policy_id="solver", reason="warm_start", detail=f"{done:.0%} done", progress=done
        )
        wait.waited_duration.seconds = 5
        view.show(observation, doing="running")
    said = [line.split("— ")[1] for line in output.getvalue().splitlines() if "warm_start" in line]
    assert said == ["10% done", "40% done", "90% done"]


def test_a_tracker_that_lacks_steps_is_told_once() -> None:
    view, output, observation = _lines()
    for missed in (1, 2):
        observation.trainers["solver"] = trainers.StatusResponse()
        fault = observation.trainers["solver"].tracker_faults.add(tracker="wandb", error="no route")
        fault.steps_missed = missed
        view.show(observation, doing="running")
    assert output.getvalue().count("solver tracker wandb lacks") == 1
    assert "wandb lacks 2 steps: no route" in _text(observation)


def test_lines_leave_out_steps_of_before_a_resume() -> None:
    view, output, observation = _lines()
    observation.num_earlier_steps = len(observation.steps)
    view.show(observation, doing="running")
    observation.steps.append(StepPoint("solver", 7, 9.0, {"reward_mean": 0.5}))
    view.show(observation, doing="running")
    lines = [line for line in output.getvalue().splitlines() if "solver step" in line]
    assert len(lines) == 1
    assert "step    7" in lines[0]


def test_the_line_of_a_step_says_what_could_not_be_trained_on() -> None:
    view, output, observation = _lines()
    unfit = {"num_left_out_trajectories": 4.0, "num_quarantined_batches": 1.0}
    observation.steps = [
        StepPoint("solver", 1, 9.0, {"reward_mean": 0.5}),
        StepPoint("solver", 2, 9.0, unfit),
    ]
    view.show(observation, doing="running")
    good, bad = (line for line in output.getvalue().splitlines() if "solver step" in line)
    assert "LEFT OUT: 4 trajectories" in bad
    assert "QUARANTINED: 1 batches that are not what they say" in bad
    assert "LEFT OUT" not in good
    assert "QUARANTINED" not in good


def test_lines_tell_a_long_wait_once_and_again_when_it_comes_back() -> None:
    view, output, observation = _lines()
    observation.steps.clear()
    assert observation.status is not None
    for waited_s in (6, 7, 0, 8):
        observation.status.waits[0].waited_duration.seconds = waited_s
        view.show(observation, doing="running")
    assert output.getvalue().count("batch waits: ready_groups — 12 of 16 groups are ready") == 2

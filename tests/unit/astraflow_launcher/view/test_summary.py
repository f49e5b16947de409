"""The final numbers of a run, from an observation made by hand."""

import json
from dataclasses import asdict

from astraflow.dataflow.v1 import account_pb2, version_pb2
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.raas.v1 import node_service_pb2
from astraflow.trainer.v1 import trainer_service_pb2
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.summary import Summary, as_table, summarize
from astraflow_launcher.view.totals import StepPoint
from support.observations import evaluation
from support.printed import printed

FIELDS = """
steps steps_by_policy policies heldout_metrics reward_first reward_last heldout_first heldout_last heldout_n wall_s
trajectories conservation_error staleness trainer_wait_fraction versions
snapshot_bytes delta_bytes_mean density_mean snapshots_fetched nodes peak_pss_bytes
heldout_scores heldout_samples steps_skipped learned_nothing failures dead_letters stopped_for tracker_faults
"""


def _observation() -> Observation:
    status = admin.StatusResponse(
        trajectories=account_pb2.TrajectoryAccount(dropped={"stale": 1}),
        policies=[admin.PolicyStatus(policy_id="solver", last_finished_step=2)],
        evaluations=[evaluation(0, 0.25, num_samples=1024), evaluation(2, 0.75, num_samples=1024)],
        nodes=[admin.NodeStatus(node_id="node-1", tokens=99)],
    )
    versions = [
        version_pb2.Version(version=0, snapshot_bytes=1000),
        version_pb2.Version(version=1, delta_bytes=100, density=0.1),
        version_pb2.Version(version=2, delta_bytes=300, density=0.3),
    ]
    served = node_service_pb2.ServedPolicy(policy_id="solver", snapshots_fetched=1)
    return Observation(
        status=status,
        trainers={"solver": trainer_service_pb2.StatusResponse(wait_fraction=0.25)},
        nodes={"node-1": node_service_pb2.StatusResponse(policies=[served])},
        versions={"solver": versions},
        steps=[StepPoint("solver", step, 1.0, {"reward_mean": step * 0.3}) for step in (1, 2)],
        restarts={"node-1": 2},
        first_reward_s=4.321,
    )


def _summary(observation: Observation) -> Summary:
    return summarize(observation, wall_s=12.0, peak_pss_bytes=2**30, goal_met=None, data_dir="/data")


def test_every_documented_field_is_there_and_json_ready() -> None:
    value = json.loads(json.dumps(asdict(_summary(_observation()))))
    assert [name for name in FIELDS.split() if name not in value] == []


def test_the_figures_come_from_what_was_observed() -> None:
    summary = _summary(_observation())
    assert (summary.steps, summary.reward_first, summary.reward_last) == (2, 0.3, 0.6)
    assert (summary.heldout_first, summary.heldout_last, summary.heldout_n) == (0.25, 0.75, 1024)
    assert (summary.versions, summary.snapshot_bytes) == (3, 1000)
    assert (summary.delta_bytes_mean, summary.density_mean) == (200.0, 0.2)
    assert (summary.snapshots_fetched, summary.trainer_wait_fraction) == (1, 0.25)
    assert (summary.nodes[0].tokens, summary.nodes[0].restarts) == (99, 2)
    assert summary.trajectories["dropped"] == {"stale": 1}
    assert summary.first_reward_s == 4.32


def test_where_trajectories_ended_adds_up_to_those_that_arrived() -> None:
    observation = _observation()
    assert observation.status is not None
    places = {"trained": 60, "in_batch": 8, "ready": 7, "assembling": 5, "evaluated": 16}
    account = account_pb2.TrajectoryAccount(ingested=100, dropped={"stale": 3, "filtered": 1}, **places)
    observation.status.trajectories.CopyFrom(account)
    shown = printed(as_table(_summary(observation)))
    said = "100 arrived = 60 trained + 8 in a batch + 7 ready + 5 in unfinished groups + 16 evaluated + 4 dropped"
    assert said in " ".join(shown.split())


def test_the_last_step_that_was_trained_says_what_it_was_trained_on() -> None:
    observation = _observation()
    figures = {
        "completion_tokens_mean": 12.5,
        "truncated_fraction": 0.25,
        "entropy": 1.5,
        "mismatch_kl": 0.002,
    }
    observation.steps.append(StepPoint("solver", 3, 2.0, figures))
    observation.steps.append(StepPoint("solver", 4, 3.0, {"skipped": 1.0, "completion_tokens_mean": 99.0}))
    summary = _summary(observation)
    solver = summary.policies["solver"]
    assert (solver.completion_tokens_mean, solver.truncated_fraction) == (12.5, 0.25)
    assert (solver.entropy, solver.mismatch_kl) == (1.5, 0.002)
    assert "12.5 tokens, 25.0% truncated; entropy 1.5, KL of engine and trainer 0.002 nats" in printed(
        as_table(summary)
    )


def test_a_tracker_that_lacks_steps_is_named() -> None:
    observation = _observation()
    observation.trainers["solver"].tracker_faults.add(tracker="wandb", steps_missed=3, error="no route")
    summary = _summary(observation)
    assert summary.tracker_faults == [{"tracker": "wandb", "error": "no route", "steps_missed": 3}]
    assert "lacks 3 steps: no route" in printed(as_table(summary))


def test_policies_that_took_different_numbers_of_steps_are_named() -> None:
    observation = _observation()
    observation.status.policies.add(policy_id="critic", last_finished_step=7)
    summary = _summary(observation)
    assert (summary.steps, summary.steps_by_policy) == (2, {"solver": 2, "critic": 7})
    assert "solver 2, critic 7 in 12 s" in printed(as_table(summary))


def test_each_policy_has_its_own_figures_and_the_episodes_theirs() -> None:
    observation = _observation()
    observation.status.policies.add(policy_id="verifier", last_finished_step=1)
    final = observation.status.evaluations.add(
        policy_id="verifier", num_samples=64, mean_reward=0.5, complete=True
    )
    final.metrics["team"] = 0.4
    final.complete_time.FromSeconds(9)
    for role, mean in (("judge", 0.4), ("critic", 0.6)):
        final.roles.add(role=role, num_samples=64, mean_reward=mean)
    summary = _summary(observation)
    solver, verifier = summary.policies["solver"], summary.policies["verifier"]
    assert (solver.heldout_first, solver.heldout_last, solver.heldout_n) == (0.25, 0.75, 1024)
    assert (solver.reward_last, solver.trainer_wait_fraction) == (0.6, 0.25)
    assert (verifier.heldout_last, verifier.reward_last, verifier.heldout_n) == (0.5, None, 64)
    assert (verifier.heldout_roles, summary.heldout_metrics) == ({"judge": 0.4, "critic": 0.6}, {"team": 0.4})
    shown = printed(as_table(summary))
    assert "verifier: held-out reward" in shown
    assert "team 0.4" in shown


def test_a_run_that_saw_nothing_has_a_summary_too() -> None:
    summary = _summary(Observation())
    assert (summary.steps, summary.heldout_last, summary.delta_bytes_mean) == (0, None, 0.0)


def test_the_table_names_the_folder_and_both_held_out_rewards() -> None:
    text = printed(as_table(_summary(_observation())))
    assert "0.25 → 0.75 (1024 samples)" in text
    assert "/data" in text


def test_a_run_whose_tasks_failed_says_so_before_all_figures() -> None:
    observation = _observation()
    observation.steps, observation.status.dead_letters = [], 3
    observation.status.policies[0].last_finished_step = 0
    observation.status.stopped_for = "tasks failed alike 100 times in a row"
    observation.status.failures.add(
        reason="reward_error", detail="KeyError: 'a' (recipe.py:9 in f)", count=100
    )
    summary = _summary(observation)
    assert summary.failures[0]["detail"] == "KeyError: 'a' (recipe.py:9 in f)"
    assert (summary.dead_letters, summary.stopped_for) == (3, "tasks failed alike 100 times in a row")
    page = printed(as_table(summary))
    order = (
        "tasks failed alike",
        "nothing was learned: no step was trained",
        "KeyError",
        "3 tasks were given up",
        "steps",
    )
    places = [page.index(text) for text in order]
    assert places == sorted(places)


def test_steps_of_a_trainer_that_is_not_ours_were_trained_though_it_has_no_metrics_here() -> None:
    observation = _observation()
    observation.steps, observation.trainers = [], {}
    assert _summary(observation).learned_nothing is None
    observation.status.policies[0].last_finished_step = 0
    assert _summary(observation).learned_nothing == "nothing was learned: no step was trained"


def test_steps_without_signal_are_counted_and_a_run_of_nothing_else_learned_nothing() -> None:
    observation = _observation()
    skipped = {"reward_mean": 0.0, "skipped": 1.0, "skipped_no_signal": 1.0}
    observation.steps[0] = StepPoint("solver", 1, 1.0, skipped)
    assert (_summary(observation).steps_skipped, _summary(observation).learned_nothing) == (1, None)
    observation.steps[1] = StepPoint("solver", 2, 1.0, skipped)
    learned = _summary(observation).learned_nothing or ""
    assert "all 2 steps were skipped, as the answers to each task earned the same reward" in learned
    observation.steps[1] = StepPoint("solver", 2, 1.0, skipped | {"skipped_no_signal": 0.0})
    assert "same reward" not in (_summary(observation).learned_nothing or "")

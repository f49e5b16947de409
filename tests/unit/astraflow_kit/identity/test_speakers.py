"""A call speaks as the node or trainer whose credential it proves, and of nobody else."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from astraflow._contract.rpcs import RpcContract, read_contract
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.dataflow.v1.version_pb2 import Version
from astraflow.errors import AstraflowError, NotFoundError
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_kit.identity import speakers
from astraflow_kit.identity.gate import ANYONE
from astraflow_kit.identity.sealing import NODE, TRAINER, Session, issue, new_key
from astraflow_kit.identity.tokens import own_nodes

KEY, OTHER_KEY = new_key(), new_key()
NODE_1 = Session(speaker=NODE, run_id="mine", name="n1", number=3, lineage="ab" * 16)
TRAINER_1 = Session(speaker=TRAINER, run_id="mine", name="solver", number=2, lineage="cd" * 16)
ONE_RUN = replace(ANYONE, runs=frozenset({"mine"}))


class Keys:
    """Two runs."""

    async def seal_key(self, run_id: str) -> str:
        if run_id not in ("mine", "theirs"):
            raise NotFoundError(f"no run {run_id}")
        return KEY if run_id == "mine" else OTHER_KEY


def contract_of(request: type[Message]) -> RpcContract:
    service, name = request.DESCRIPTOR.file.services_by_name, request.DESCRIPTOR.name.removesuffix("Request")
    (only,) = service.values()
    return read_contract(descriptor_pool.Default().FindMethodByName(f"{only.full_name}.{name}"))


def called(request: Message, credential: str | None, *, identity: Any = ANYONE) -> Session | None:
    """As whom a call of this request speaks, after its request was compared."""
    contract = contract_of(type(request))
    metadata = {} if credential is None else {speakers.METADATA: credential}

    async def call() -> Session | None:
        await speakers.prove(contract, metadata, keys=Keys(), identity=identity)
        speakers.hold(contract, request, identity=identity)
        return speakers.speaker()

    return asyncio.run(call())


def why_refused(request: Message, credential: str | None, *, identity: Any = ANYONE) -> tuple[str, str]:
    with pytest.raises(AstraflowError) as caught:
        called(request, credential, identity=identity)
    return caught.value.reason, caught.value.metadata["reason"]


def issued(session: Session, key: str = KEY, **changes: Any) -> str:
    return issue(replace(session, **changes), key=key)


NODE_CALLS: list[Message] = [
    tasks.RenewLeasesRequest(),
    tasks.FailTaskRequest(),
    tasks.LeaseTasksRequest(),
    tasks.WorkRequest(hello=tasks.Hello()),
    pushes.PushRequest(episodes=[Episode()]),
    pushes.PushEpisodeRequest(episode=Episode()),
]
TRAINER_CALLS: list[Message] = [
    batches.ReleasePolicyRequest(),
    batches.AcquireBatchRequest(),
    batches.FetchBatchRequest(),
    batches.AckBatchRequest(),
    batches.NackBatchRequest(),
    batches.RenewBatchRequest(),
    batches.MarkDurableRequest(),
    versions.PublishRequest(),
]
CALLS = [(call, NODE_1) for call in NODE_CALLS] + [(call, TRAINER_1) for call in TRAINER_CALLS]
FORGED = {
    "of another run's key": lambda own: issued(own, OTHER_KEY),
    "of another name": lambda own: issued(own).replace(own.name, "other"),
    "of another number": lambda own: issued(own).replace(f"/{own.number}/", "/4/"),
    "cut": lambda own: issued(own)[:-1],
    "no credential": lambda own: "hello",
}


@pytest.mark.parametrize(("request_", "own"), CALLS)
def test_who_shows_its_credential_is_who_it_says(request_: Message, own: Session) -> None:
    assert called(request_, issued(own)) == own


@pytest.mark.parametrize(("request_", "own"), CALLS)
def test_who_shows_none_is_refused(request_: Message, own: Session) -> None:
    assert why_refused(request_, None) == ("UNAUTHENTICATED", "no_session")


@pytest.mark.parametrize("forgery", FORGED)
@pytest.mark.parametrize(("request_", "own"), CALLS)
def test_a_forged_one_is_refused(request_: Message, own: Session, forgery: str) -> None:
    assert why_refused(request_, FORGED[forgery](own)) == ("UNAUTHENTICATED", "wrong_session")


@pytest.mark.parametrize(("request_", "own"), CALLS)
def test_a_trainer_is_no_node_and_a_node_no_trainer(request_: Message, own: Session) -> None:
    other = TRAINER_1 if own is NODE_1 else NODE_1
    assert why_refused(request_, issued(other)) == ("PERMISSION_DENIED", "wrong_session")


def test_a_session_of_a_run_that_the_token_is_not_for_is_refused() -> None:
    theirs = issued(NODE_1, OTHER_KEY, run_id="theirs")
    assert called(tasks.RenewLeasesRequest(), theirs) is not None
    refused = why_refused(tasks.RenewLeasesRequest(), theirs, identity=ONE_RUN)
    assert refused == ("PERMISSION_DENIED", "run")


@pytest.mark.parametrize(
    ("nodes", "name", "may"),
    [
        (["*"], "n1", True),
        (["n1"], "n1", True),
        (["n1"], "n11", False),
        (["n*"], "n11", True),
        (["spot-*"], "spot", False),
        ([], "n1", False),
        (own_nodes("spot"), "spot", True),
        (own_nodes("spot"), "spot-eu-1", False),
        (own_nodes("spot"), "spotless", False),
    ],
)
def test_a_node_is_called_as_its_token_says(nodes: list[str], name: str, may: bool) -> None:
    holder = replace(ANYONE, nodes=frozenset(nodes))
    calls: list[tuple[Message, str | None]] = [
        (runs.JoinRunRequest(node_id=name), None),
        (tasks.RenewLeasesRequest(), issued(NODE_1, name=name)),
    ]
    for request, credential in calls:
        if may:
            called(request, credential, identity=holder)
        else:
            assert why_refused(request, credential, identity=holder) == ("PERMISSION_DENIED", "node")


LIES: list[tuple[Message, Session]] = [
    (tasks.RenewLeasesRequest(node_id="n2"), NODE_1),
    (tasks.RenewLeasesRequest(run_id="theirs"), NODE_1),
    (tasks.FailTaskRequest(node_id="n2"), NODE_1),
    (tasks.LeaseTasksRequest(node_id="n1", incarnation=4), NODE_1),
    (tasks.LeaseTasksRequest(incarnation=2**53), NODE_1),
    (tasks.WorkRequest(hello=tasks.Hello(node_id="n2")), NODE_1),
    (batches.AckBatchRequest(policy_id="critic"), TRAINER_1),
    (batches.AckBatchRequest(trainer_epoch=3), TRAINER_1),
    (batches.HoldPolicyRequest(trainer_epoch=1), TRAINER_1),
    (versions.PublishRequest(version=Version(policy_id="critic")), TRAINER_1),
]


@pytest.mark.parametrize(("request_", "own"), LIES)
def test_a_request_that_names_another_is_refused(request_: Message, own: Session) -> None:
    assert why_refused(request_, issued(own)) == ("PERMISSION_DENIED", "wrong_session")


def test_what_a_request_leaves_out_is_the_sessions() -> None:
    request = tasks.LeaseTasksRequest()
    called(request, issued(NODE_1))
    assert (request.run_id, request.node_id, request.incarnation) == ("mine", "n1", 3)
    acked = batches.AckBatchRequest()
    called(acked, issued(TRAINER_1))
    assert (acked.run_id, acked.policy_id, acked.trainer_epoch) == ("mine", "solver", 2)


@pytest.mark.parametrize(("request_", "own"), CALLS)
def test_whoever_speaks_learns_that_its_run_is_gone(request_: Message, own: Session) -> None:
    with pytest.raises(NotFoundError):
        called(request_, issued(own, run_id="gone"))


def test_episodes_are_left_to_whoever_answers_for_each() -> None:
    assert (
        called(pushes.PushRequest(episodes=[Episode(node_id="n2", run_id="theirs")]), issued(NODE_1))
        == NODE_1
    )


@pytest.mark.parametrize(
    "shown",
    [None, "hello", issued(NODE_1, OTHER_KEY), issued(NODE_1, run_id="gone")],
    ids=["nothing", "no credential", "another server's", "a deleted run's"],
)
def test_whoever_joins_without_proof_is_somebody_new(shown: str | None) -> None:
    assert called(runs.JoinRunRequest(run_id="mine", node_id="n1"), shown) is None


def test_whoever_joins_again_shows_its_last_session() -> None:
    assert called(runs.JoinRunRequest(run_id="mine", node_id="n1"), issued(NODE_1)) == NODE_1


def test_a_trainer_holds_on_before_its_claim_without_credential_but_names_no_epoch() -> None:
    assert called(batches.HoldPolicyRequest(run_id="mine", policy_id="solver"), None) is None
    refused = why_refused(batches.HoldPolicyRequest(policy_id="solver", trainer_epoch=1), None)
    assert refused == ("UNAUTHENTICATED", "no_session")


def test_a_trainer_that_released_its_policy_does_not_hold_it_again_by_a_word() -> None:
    told = batches.HoldPolicyRequest(policy_id="solver")
    called(told, issued(TRAINER_1))
    assert told.trainer_epoch == 0


def test_a_trainer_announces_what_an_earlier_one_wrote() -> None:
    written = Version(policy_id="solver", trainer_epoch=1)
    request = versions.PublishRequest(version=written)
    called(request, issued(TRAINER_1))
    assert (request.trainer_epoch, request.version.trainer_epoch) == (2, 1)

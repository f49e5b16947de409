"""What the newest probes of Redis say is wrong, and since when."""

from astraflow_dataflow.rules.redis_health import SLOW_PROBES, SLOW_S, RedisHealth


def made(*latencies_s: float) -> RedisHealth:
    """After probes that were answered in these times, one a second."""
    health = RedisHealth("redis://r:6379/0")
    for now_s, latency_s in enumerate(latencies_s):
        health.answered(latency_s, now_s=float(now_s))
    return health


def test_redis_is_slow_only_when_each_of_the_last_probes_was() -> None:
    slow = [SLOW_S] * SLOW_PROBES
    assert made(*slow[1:]).problem is None
    assert made(*slow[1:], 0.01, *slow[1:]).problem is None
    problem = made(0.01, *slow).problem
    assert problem is not None
    assert (problem.reason, problem.since_ms) == ("redis_slow", SLOW_PROBES * 1000)
    assert "the last 5 probes took 0.25 s or more, the bound is 0.25 s" in problem.detail


def test_a_problem_keeps_its_beginning_until_it_is_another_or_over() -> None:
    health = made(0.01)
    for now_s in (10.0, 12.0):
        health.silent(now_s - 8.0, "refused", now_s=now_s)
    assert health.problem is not None
    assert (health.problem.since_ms, "no answer for 4 s: refused" in health.problem.detail) == (8000, True)
    health.answered(0.01, now_s=13.0, refused_as="redis_full", figures={"maxmemory_human": "1G"})
    assert health.problem is not None
    assert (health.problem.reason, health.problem.since_ms) == ("redis_full", 13_000)
    assert "maxmemory is 1G" in health.problem.detail
    health.answered(0.01, now_s=14.0)
    assert health.problem is None

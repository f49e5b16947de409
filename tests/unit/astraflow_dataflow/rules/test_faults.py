"""What is remembered of plug-ins that failed."""

from astraflow.errors import PluginError
from astraflow_dataflow.rules.faults import SHOWN_S, SLOW_S, PluginFaults


def test_faults_are_counted_and_the_same_one_is_news_once() -> None:
    faults = PluginFaults()
    notes = [faults.note("filter", "a:A", error) for error in (KeyError("x"), KeyError("x"), KeyError("y"))]
    assert notes == [True, False, True]
    (fault,) = faults.all()
    assert (fault.count, fault.problem) == (3, "KeyError: 'y'")


def test_a_fault_is_shown_for_a_while_after_it_last_happened() -> None:
    now_s = 0.0
    faults = PluginFaults(monotonic_s=lambda: now_s)
    faults.note("filter", "a:A", KeyError())
    now_s = SHOWN_S
    assert len(faults.current()) == 1
    now_s = SHOWN_S + 1
    assert (faults.current(), len(faults.all())) == ([], 1)


def test_a_plugin_that_works_again_has_no_fault() -> None:
    faults = PluginFaults()
    faults.note("dataset", "a:A", PluginError("index 7 is gone"))
    assert faults.all()[0].problem == "index 7 is gone"
    faults.clear("dataset", "a:A")
    faults.clear("dataset", "a:A")
    assert faults.all() == []


def test_a_slow_call_is_a_fault_and_a_quick_one_is_not() -> None:
    now_s = 0.0
    faults = PluginFaults(monotonic_s=lambda: now_s)
    for took_s in (SLOW_S, 3 * SLOW_S):
        with faults.timed("selector", "a:A"):
            now_s += took_s
    (fault,) = faults.all()
    assert (fault.count, fault.problem) == (1, "TimeoutError: it took 3 s, at most 1 s; make it faster")


def test_a_call_that_does_not_return_is_shown_while_it_runs() -> None:
    now_s = 0.0
    faults = PluginFaults(monotonic_s=lambda: now_s)
    with faults.running("dataset", "a:A"):
        assert faults.current() == []
        now_s = 12.0
        (fault,) = faults.current()
        assert (fault.name, fault.problem) == ("a:A", "a call has not returned for 12 s")
        assert fault.hangs
    assert (faults.current(), faults.all()) == ([], [])

"""The fast manager and its plain-Python twin live the same random lives, and everything observable stays equal."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.manager_machine import NUM_STEPS, ManagerMachine, Ran

from ctxcache.ids import ContextCacheDeploymentKind as Kind

NUM_EXAMPLES = 300
ROUND = settings(
    max_examples=NUM_EXAMPLES // 2,
    stateful_step_count=NUM_STEPS + 1,  # building the managers counts as a step
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MAX_ROUNDS = 8  # Hypothesis cuts about every fourth example short, so that three rounds mostly do


@pytest.mark.sampled(keep=1 / 3)
@pytest.mark.timeout(900)  # about 20 seconds of processor time each, on machines that may be busy
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_the_managers_agree(kind):
    """Whatever is done to both, results, pages, order, counters and refusals are equal, and the invariants hold.

    Also that this was really tried: at least 300 examples ran at least 40 steps each.
    """
    machine = type(f"{kind.name}Machine", (ManagerMachine,), {"kind": kind, "ran": Ran()})
    for _ in range(MAX_ROUNDS):
        run_state_machine_as_test(machine, settings=ROUND)
        if machine.ran.num_full_examples >= NUM_EXAMPLES:
            break
    assert sum(steps >= 40 for steps in machine.ran.steps) >= 300

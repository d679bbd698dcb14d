"""Two engines on a Ray cluster of two nodes: the bits of the engine beside the actor, through every kind of loss.

The cluster is one in a box: two of Ray's nodes, of one CPU each, in processes of this machine.
"""

import os
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rollout_cases import assert_same_bits, request_for
from test_engine_alone import MODEL, adapter_of
from test_ray_handle import config
from tests_support import alive, wait_until

from flowgrpo_rc.models import load_model
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout import EngineLostError, RolloutError, RolloutPool
from flowgrpo_rc.rollout.build import build_engine_alone, digest_rule
from flowgrpo_rc.rollout.ray.handle import ray_handles

pytestmark = [pytest.mark.process, pytest.mark.slow]
STORE = 100_000_000
"""Bytes of each node's object store, the least that Ray accepts being 75 MB."""
SILENCE = 6.0


@dataclass
class Box:
    """A cluster, and what is drawn on it."""

    cluster: Any
    expected: Any
    state: Any
    request: Any
    pool: RolloutPool | None = None
    handles: Any = ()

    @property
    def address(self):
        return self.cluster.address

    def open(self):
        """A pool of two engines, one a node."""
        if self.pool is None:
            self.pool, self.handles = make_pool(self.address, engines=2)
            self.pool.sync(self.state, 0)
        return self.pool, self.handles

    def close(self):
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def make_pool(address, **settings):
    rollout = config(address, **({"silence_timeout_s": SILENCE, "close_timeout_s": 10.0} | settings))
    handles = ray_handles(rollout, MODEL, "cpu")
    rule = digest_rule(rollout, MODEL)
    return RolloutPool(handles, digest_of=rule, dtype=torch.bfloat16, micro_batch_size=2), handles


@pytest.fixture(scope="module")
def box(ray_environment):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ray_environment.keys() - os.environ.keys():
            patch.setenv(name, ray_environment[name])
        # A node is known to be gone after this.
        for name in ("health_check_initial_delay_ms", "health_check_period_ms", "health_check_timeout_ms"):
            patch.setenv(f"RAY_{name}", "1000")
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
        model = load_model(MODEL.path)
        state = adapter_of(model)
        request = request_for(model, cfg=4.0)
        host = build_engine_alone(config(), MODEL, "cpu")
        host.sync(state, 0)
        found = Box(cluster, host.generate(request), state, request)
        yield found
        found.close()
        with suppress(Exception):
            cluster.shutdown()


@pytest.fixture
def two(box):
    """The box with its two engines; what a test leaves them in is of no account."""
    pool, handles = box.open()
    at_work = set()
    while len(at_work) < len(handles):  # one that is lost twice without having drawn would be given up
        assert not has_failed(pool)
        pool.generate(box.request)
        at_work |= {work.engine for work in done_by(pool) if work.what == "draw"}
    yield box
    if has_failed(pool):
        box.close()


def done_by(pool):
    """The engines' work since the last call."""
    return [work for engine in pool.take_account() for work in engine.done]


def has_failed(pool):
    return pool._failure is not None or any(member.given_up for member in pool._members)


def stop(handle):
    """From now on it takes calls, and does nothing."""
    os.kill(handle.pid, signal.SIGSTOP)


def kill(handle):
    os.kill(handle.pid, signal.SIGKILL)


def has_done(pool, what, times=1):
    """True once the engines have done so much since."""
    done = []

    def so_much():
        done.extend(work for work in done_by(pool) if work.what == what)
        return len(done) >= times

    return so_much


def test_two_actors_draw_the_bits_of_the_engine_beside_the_actor(two):
    pool, handles = two.pool, two.handles
    assert pool.sync(two.state, 0) == digest_rule(config(), MODEL)(two.state)
    assert_same_bits(pool.generate(two.request), two.expected)
    assert handles[0].pid != handles[1].pid
    assert [handle.name for handle in handles] == ["ray 0", "ray 1"]


def test_killed_while_drawing(two):
    """Its rows are drawn by the other one."""
    pool, (first, _) = two.pool, two.handles
    before = first.pid
    stop(first)
    pending = pool.submit(two.request)
    wait_until(has_done(pool, "draw", 2))
    kill(first)
    with pytest.warns(UserWarning, match="rollout engine ray 0 is started anew: The actor is dead because .*died"):
        assert_same_bits(pending.result(), two.expected)
    wait_until(lambda: first.pid not in (before, -1), 300)


def test_one_that_hangs_is_ended_and_its_rows_are_drawn_by_the_other(two):
    """SIGSTOP: alive for Ray, which would wait for it for good."""
    pool, (_, second) = two.pool, two.handles
    before = second.pid
    stop(second)
    words = (
        rf"rollout engine ray 1 is started anew: gave no sign of life for {SILENCE:g} s while sampling; it was ended"
    )
    with pytest.warns(UserWarning, match=words):
        assert_same_bits(pool.generate(two.request), two.expected)
    wait_until(lambda: second.pid not in (before, -1), 300)
    assert not alive(before)


def test_an_error_of_the_engine_comes_back_in_one_line(two):
    _, (first, _) = two.pool, two.handles
    with pytest.raises(AdapterMismatchError, match="adapter") as caught:
        first.sync(dict(list(two.state.items())[1:]), 5)
    assert "\n" not in str(caught.value)
    request = replace(two.request, noise_level=float("nan"))
    with pytest.raises(RolloutError, match="non-finite") as caught:
        first.generate(request)
    assert not isinstance(caught.value, EngineLostError)
    assert "\n" not in str(caught.value)


def test_without_room_one_line_says_what_was_asked_and_what_there_is(two):
    """Both CPUs are taken."""
    (third,) = ray_handles(config(two.address, start_timeout_s=15.0), MODEL, "cpu")
    words = (
        r"^no node of the Ray cluster had room for it within 15 s: asked for 0 GPU and 1 CPU "
        r"\(actor_rollout_ref.rollout.ray.num_gpus, num_cpus\) on one node, the 2 nodes have 0 GPU \(0 free\) and "
        r"2 CPU \(0 free\); ask for less, lower actor_rollout_ref.rollout.engines or add nodes$"
    )
    with pytest.raises(EngineLostError, match=words):
        third.start()
    third.close()


def test_a_node_that_is_gone_takes_its_engine_with_it(two):
    """The other one goes on alone, while Ray has no room for one in its place."""
    pool, handles = two.pool, two.handles
    (node,) = two.cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    (lost,) = (handle for handle in handles if parent_of(handle.pid) == raylet)
    two.cluster.remove_node(node, allow_graceful=False)
    deadline = time.monotonic() + 120
    told = []
    while not told and time.monotonic() < deadline:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert_same_bits(pool.generate(two.request), two.expected)
    assert [str(one.message).partition(": ")[0] for one in told] == [f"rollout engine {lost.name} is started anew"]
    assert_same_bits(pool.generate(two.request), two.expected)


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])

"""Any order of events: the invariants hold, every open ask is answered once, and the planner ends up empty."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rfork.clock import ManualClock
from rfork.planner.events import Assigned, Claimed, ClaimLost, Deliver, Drain, Hangup, Parked, Tick, Withdraw
from rfork.planner.invariants import check
from rfork.planner.lifecycle import PlannerError
from rfork.planner.policy import Policy
from rfork.planner.state import PlannerState
from rfork.wire.planner import Ask, ForkFrom, Heartbeat, InstanceState, LeaseView, Outcome, Report

NAMES = st.sampled_from([f"i-{n}" for n in range(6)])
KEYS = st.sampled_from(["a" * 64, "b" * 64])
REASONS = st.sampled_from(["", "unreachable", "manifest_mismatch"])


class PlannerMachine(RuleBasedStateMachine):
    @initialize(fan_out=st.integers(0, 2), settle_s=st.sampled_from([0.0, 12.0]))
    def start(self, fan_out, settle_s):
        self.clock = ManualClock()
        self.state = PlannerState(Policy(fan_out=fan_out, settle_s=settle_s, max_instances=5), self.clock.now())
        self.polls = itertools.count()
        self.open: dict[int, tuple[str, float]] = {}

    def feed(self, event):
        now = self.clock.now()
        try:
            effects = self.state.handle(event, now)
        except PlannerError:
            return
        for effect in effects:
            if isinstance(effect, Deliver):
                client, _ = self.open.pop(effect.poll)
                assert client == effect.client
                if isinstance(effect.answer, ForkFrom):
                    self.judge(client, effect.answer)

    def judge(self, client, answer):
        for candidate in answer.candidates:
            assert candidate.instance_id != client
            assert candidate.listener
            inst = self.state.instances[candidate.instance_id]
            assert inst.beat.state is InstanceState.SERVING
            assert inst.expires_at > self.clock.now()

    @rule(
        name=NAMES,
        key=KEYS,
        live=st.booleans(),
        state=st.sampled_from(InstanceState),
        capacity=st.integers(0, 3),
        listener=st.integers(0, 4),
        leases=st.lists(NAMES, max_size=3, unique=True),
        zone=st.sampled_from(["", "z1"]),
        reads_disk=st.booleans(),
    )
    def beat(self, name, key, live, state, capacity, listener, leases, zone, reads_disk):
        self.feed(
            Heartbeat(
                instance_id=name,
                instance_key=key,
                live_key="c" * 64 if live else "",
                state=state,
                capacity=capacity,
                listener=f"http://h:{listener}" if listener else "",
                leases=[LeaseView(client=c) for c in leases],
                labels={"zone": zone},
                reads_disk=reads_disk,
            )
        )

    @rule(
        client=NAMES,
        key=KEYS,
        wait_s=st.sampled_from([0.0, 20.0]),
        disk=st.booleans(),
        exclude=st.lists(NAMES, max_size=3),
    )
    def ask(self, client, key, wait_s, disk, exclude):
        poll = next(self.polls)
        self.open[poll] = (client, self.clock.now())
        self.feed(
            Parked(
                Ask(client=client, instance_key=key, wait_s=wait_s, bound_s=45.0, allow_disk=disk, exclude=exclude),
                poll,
            )
        )

    @rule(client=NAMES, key=KEYS, seed=NAMES, outcome=st.sampled_from(Outcome), reason=REASONS)
    def report(self, client, key, seed, outcome, reason):
        self.feed(Report(client=client, instance_key=key, seed=seed, outcome=outcome, reason=reason))

    @rule(name=NAMES)
    def withdraw(self, name):
        self.feed(Withdraw(name))

    @rule(name=NAMES)
    def drain(self, name):
        self.feed(Drain(name))

    @rule(client=NAMES, key=KEYS, seed=NAMES)
    def another_planner_assigned(self, client, key, seed):
        self.feed(Assigned(key, client, seed))

    @rule(client=NAMES, key=KEYS, holder=NAMES)
    def another_planner_claimed(self, client, key, holder):
        self.feed(Claimed(key, client))
        self.feed(ClaimLost(key, client, {holder: 20.0}))

    @rule(pick=st.randoms(use_true_random=False))
    def hang_up(self, pick):
        if self.open:
            poll = pick.choice(sorted(self.open))
            client, _ = self.open.pop(poll)
            self.feed(Hangup(client, poll))

    @rule(duration_s=st.sampled_from([0.1, 1.0, 15.0, 40.0, 700.0]))
    def time_passes(self, duration_s):
        self.clock.advance(duration_s)
        self.feed(Tick())
        for client, since in self.open.values():
            assert self.clock.now() - since <= 30.0, f"{client} was left waiting"

    @invariant()
    def rules_hold(self):
        check(self.state, self.clock.now())

    def teardown(self):
        if not hasattr(self, "state"):
            return
        for _ in range(3):
            self.clock.advance(10_000.0)
            self.feed(Tick())
        assert not self.open
        assert not self.state.pools, f"leaked {self.state.pools}"
        assert not self.state.instances
        assert not self.state.seeds_of_client


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

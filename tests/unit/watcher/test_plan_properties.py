"""Properties of the plan, for any state of the world."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from hypothesis import given
from hypothesis import strategies as st

from policyline.ledger.line_snapshot import Role
from policyline.ledger.rows import ResidencyState
from policyline.watcher.core import reconcile_state
from policyline.watcher.core.back_off import BackOff
from policyline.watcher.core.engine_health import is_hung
from policyline.watcher.core.model import (
    Ack,
    Action,
    Announce,
    DeleteLocal,
    DeleteOrphans,
    Desired,
    Fetch,
    Free,
    Known,
    Limits,
    Load,
    Observed,
    Pause,
    Prove,
    Reject,
    RemoveForeign,
    ReportForeign,
    ReportGone,
    Resume,
    Unknown,
    Unload,
    Verify,
    Version,
)
from policyline.watcher.core.plan import must_observe, plan
from policyline.watcher.core.reconcile_state import Hang, ReconcileState
from tests.unit.watcher.builders import HOME, INCARNATION, LINE, path, version

NUMBERS = range(1, 9)
Listing = Literal["no", "ours", "foreign"]


@dataclass(frozen=True)
class World:
    """Everything a plan is made from."""

    desired: Desired
    observed: Known
    state: ReconcileState
    limits: Limits
    now: float = 1000.0


times = st.floats(min_value=900.0, max_value=1100.0)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    versions: list[Version] = []
    adapters: dict[str, str] = {}
    local: set[str] = set()
    busy: set[str] = set()
    for number in NUMBERS:
        role = draw(st.sampled_from([*get_args(Role), None, None]))
        reported = draw(st.sampled_from([*get_args(ResidencyState), None]))
        life = draw(st.sampled_from([INCARNATION, "999.0"]))
        made = version(number, role, reported, life if reported == "acked" else None)
        listing = draw(st.sampled_from(get_args(Listing)))
        if listing != "no":
            adapters[made.name] = path(made) if listing == "ours" else "/elsewhere"
        if draw(st.booleans()):
            local.add(made.copy_name)
        if draw(st.booleans()):
            busy.add(made.name)
        if draw(st.booleans()):
            versions.append(made)
    wanted = [v for v in versions if v.role is not None]
    some = st.dictionaries(st.sampled_from(list(NUMBERS)), times)
    return World(
        desired=Desired(
            line=LINE,
            incarnation=draw(
                st.sampled_from([INCARNATION, INCARNATION, INCARNATION, "999.0", None])
            ),
            wanted=tuple(draw(st.permutations(wanted))),
            out_of_window=tuple(v for v in versions if v.role is None),
            paused=draw(st.sampled_from([False, False, True])),
        ),
        observed=Known(
            INCARNATION,
            adapters,
            draw(st.sampled_from([frozenset(busy), None])),
            HOME,
            frozenset(local),
            paused=draw(st.sampled_from([False, False, True, None])),
            verified=draw(st.sampled_from([None, frozenset()])),
            over_limit=draw(st.booleans()),
            adapter_ids=draw(st.dictionaries(st.sampled_from(list(NUMBERS)), st.integers(1, 99))),
        ),
        state=ReconcileState(
            back_offs={n: BackOff(1, t, "cause") for n, t in draw(some).items()},
            out_of_window_since_s=draw(some),
            alive_at_s=draw(st.one_of(st.none(), times)),
            doubt=draw(st.sampled_from(["", "", "slow"])),
            hang=draw(st.sampled_from([None, None, Hang(INCARNATION, "x", 1, 1000.0)])),
            idle_since_s=draw(some),
            deaths=draw(st.dictionaries(st.sampled_from(list(NUMBERS)), st.integers(0, 3))),
        ),
        limits=Limits(
            max_loras=draw(st.one_of(st.none(), st.integers(1, 8))),
            linger_s=2.0,
            grace_s=30.0,
            poll_interval_s=5.0,
            take_over=draw(st.booleans()),
        ),
    )


def planned(world: World, observed: Observed | None = None) -> tuple[Action, ...]:
    seen = world.observed if observed is None else observed
    return plan(world.desired, seen, world.state, world.limits, world.now).actions


@given(worlds(), st.booleans())
def test_unknown_changes_neither_engine_nor_disk(world: World, gone: bool) -> None:
    """I10."""
    blind = planned(world, Unknown("cause", gone=gone))
    deaf = plan(Unknown("cause"), world.observed, world.state, world.limits, world.now).actions

    assert all(isinstance(a, Announce) and a.incarnation is None and gone for a in blind)
    assert deaf == ()


@given(worlds())
def test_an_empty_ledger_unloads_and_deletes_nothing(world: World) -> None:
    """I10: an empty desired state is no reason to empty the engine."""
    empty = replace(world.desired, wanted=(), out_of_window=())
    world = replace(
        world, state=reconcile_state.note(world.state, empty, world.observed, world.now)
    )
    limits = replace(world.limits, take_over=False)

    actions = plan(empty, world.observed, world.state, limits, world.now).actions

    harmful = (Unload, DeleteLocal, DeleteOrphans, RemoveForeign, Free)
    assert not [a for a in actions if isinstance(a, harmful)]


@given(worlds())
def test_only_out_of_window_or_rejected_versions_of_ours_are_unloaded(world: World) -> None:
    """I3."""
    for action in planned(world):
        if isinstance(action, Unload):
            target = action.target
            assert target.role is None or target.reported == "rejected"
            assert world.observed.lists(target)


@given(worlds())
def test_files_go_only_when_the_engine_certainly_needs_them_no_more(world: World) -> None:
    """I3. The times of `idle_since_s` come from `note`, which demands the same."""
    noted = reconcile_state.note(world.state, world.desired, world.observed, world.now)
    actions = planned(replace(world, state=noted))

    for action in actions:
        for target in action.targets if isinstance(action, DeleteLocal) else ():
            assert target.role is None
            assert target.name not in world.observed.adapters
            assert world.observed.busy is not None
            assert target.name not in world.observed.busy


@given(worlds())
def test_foreign_adapters_stay_without_take_over(world: World) -> None:
    for action in planned(world):
        if isinstance(action, RemoveForeign):
            assert world.limits.take_over
            assert world.observed.busy is not None
            assert action.name not in world.observed.busy


@given(worlds())
def test_versions_are_served_in_the_order_of_the_ledger(world: World) -> None:
    steps = [a.target for a in planned(world) if isinstance(a, (Fetch, Load, Ack))]

    assert sorted(steps, key=world.desired.wanted.index) == steps


@given(worlds())
def test_the_slots_are_never_overbooked_by_loads(world: World) -> None:
    slots = world.limits.max_loras
    if slots is None:
        return
    versions = (*world.desired.wanted, *world.desired.out_of_window)
    pending = sum(world.observed.lists(v) for v in versions)
    removable = sum(
        world.observed.lists(v) for v in versions if v.role is None or v.reported == "rejected"
    )
    for action in planned(world):
        if isinstance(action, Unload):
            pending -= 1
            removable -= 1
        elif isinstance(action, Load):
            pending += 1
            assert pending <= slots or removable == 0


@given(worlds(), st.sampled_from(list(NUMBERS)))
def test_a_version_in_back_off_changes_nothing_for_others(world: World, number: int) -> None:
    """I9. Without slots and without a full cache, which versions share."""
    world = replace(world, limits=replace(world.limits, max_loras=None))
    world = replace(world, observed=replace(world.observed, over_limit=False))
    state = world.state
    troubled = {**state.back_offs, number: BackOff(9, world.now + 60, "bad")}
    free = {n: t for n, t in state.back_offs.items() if n != number}

    def others(back_offs: dict[int, BackOff]) -> list[Action]:
        made = planned(replace(world, state=replace(state, back_offs=back_offs)))
        return [a for action in made for a in single(action) if f"-v{number}'" not in repr(a)]

    def single(action: Action) -> list[Action]:
        """Deletions come in batches, which are told apart here by their members."""
        if isinstance(action, DeleteLocal):
            return [replace(action, targets=(target,)) for target in action.targets]
        return [action]

    assert others(free) == others(troubled)


@given(worlds())
def test_only_what_is_unloaded_and_not_desired_leaves_the_workers(world: World) -> None:
    """I3: a desired version is never pushed out by us."""
    for action in planned(world):
        if isinstance(action, Free):
            target = action.target
            assert target.role is None or target.reported == "rejected"
            assert target.name not in world.observed.adapters
            assert world.observed.busy is not None
            assert target.name not in world.observed.busy


@given(worlds())
def test_a_paused_or_hung_engine_is_asked_nothing_that_needs_an_answer(world: World) -> None:
    """Item 9: a scored request would hang. A hung one is asked only whether it answers again."""
    hung = is_hung(world.state, world.observed)
    if not hung and not world.observed.paused:
        return
    needing = (Load, Ack, DeleteLocal, RemoveForeign) if hung else (Load, Ack, DeleteLocal, Prove)

    assert not [a for a in planned(world) if isinstance(a, needing)]


@given(worlds())
def test_every_plan_observes_again_within_the_poll_interval(world: World) -> None:
    found = plan(world.desired, world.observed, world.state, world.limits, world.now)

    assert found.wake_at_s <= world.now + world.limits.poll_interval_s


@given(worlds())
def test_applying_plans_reaches_the_desired_set_and_then_rest(world: World) -> None:
    """I8, with an engine that does what it is told."""
    world = replace(
        world,
        state=ReconcileState(),
        desired=replace(world.desired, paused=False),
        observed=replace(
            world.observed,
            busy=frozenset(),
            adapters={n: p for n, p in world.observed.adapters.items() if p.startswith(HOME)},
        ),
        limits=replace(world.limits, take_over=True),
    )
    for _ in range(100):
        state = reconcile_state.note(world.state, world.desired, world.observed, world.now)
        world = replace(world, state=state)
        found = plan(world.desired, world.observed, state, world.limits, world.now)
        for action in found.actions:
            world = _done(world, action)
            if must_observe(after=action, age_s=0.0):
                break
        if not found.actions:
            world = replace(world, now=found.wake_at_s)
    state = reconcile_state.note(world.state, world.desired, world.observed, world.now)
    rest = plan(world.desired, world.observed, state, world.limits, world.now).actions
    assert all(isinstance(action, Prove) for action in rest)

    servable = [v for v in world.desired.wanted if v.reported != "rejected"]
    slots = len(servable) if world.limits.max_loras is None else world.limits.max_loras
    for wanted in servable[:slots]:
        assert world.observed.lists(wanted)
        assert wanted.acked_by(INCARNATION)
        assert wanted.copy_name in world.observed.local
    for out_of_window in world.desired.out_of_window:
        assert out_of_window.name not in world.observed.adapters
        assert out_of_window.copy_name not in world.observed.local


def _done(world: World, action: Action) -> World:
    """The world after an action that worked."""
    match action:
        case Announce(incarnation):
            return replace(world, desired=replace(world.desired, incarnation=incarnation))
        case ReportForeign(name, where):
            reported = reconcile_state.foreign_reported(world.state, INCARNATION, name, where)
            return replace(world, state=reported)
        case ReportGone(target):
            return replace(world, desired=_said(world.desired, target, "evicted"))
        case Reject(target):
            return replace(world, desired=_said(world.desired, target, "rejected"))
        case Prove() | Pause() | Resume():
            return _stood(world, action)
        case _:
            return _changed(world, action)


def _stood(world: World, action: Prove | Pause | Resume) -> World:
    if isinstance(action, Prove):
        return replace(world, state=reconcile_state.answered(world.state, world.now))
    return replace(world, observed=replace(world.observed, paused=isinstance(action, Pause)))


def _changed(
    world: World,
    action: Fetch
    | Load
    | Ack
    | Unload
    | Free
    | Verify
    | DeleteOrphans
    | DeleteLocal
    | RemoveForeign,
) -> World:
    desired, observed = world.desired, world.observed
    adapters, local = dict(observed.adapters), set(observed.local)
    match action:
        case RemoveForeign():
            del adapters[action.name]
        case Fetch(target):
            local.add(target.copy_name)
        case Load(target) | Ack(target):
            adapters[target.name] = path(target)
            desired = _said(desired, target, "acked")
        case Unload(target):
            del adapters[target.name]
            if target.reported != "rejected":
                desired = _said(desired, target, "evicted")
        case Free(target):
            kept = {n: i for n, i in observed.adapter_ids.items() if n != target.version}
            observed = replace(observed, adapter_ids=kept)
        case DeleteLocal(targets):
            local -= {target.copy_name for target in targets}
        case DeleteOrphans(paths):
            local -= {where.removeprefix(f"{HOME}/") for where in paths}
        case Verify(target):
            observed = replace(observed, verified=(observed.verified or frozenset()) | local)
    observed = replace(observed, adapters=adapters, local=frozenset(local))
    return replace(world, desired=desired, observed=observed)


def _said(desired: Desired, target: Version, reported: ResidencyState) -> Desired:
    def update(found: Version) -> Version:
        if found.version != target.version:
            return found
        return replace(
            found, reported=reported, incarnation=INCARNATION if reported == "acked" else None
        )

    return replace(
        desired,
        wanted=tuple(map(update, desired.wanted)),
        out_of_window=tuple(map(update, desired.out_of_window)),
    )

"""From items to rows: positions, choices, history only where it counts, bans until min_tokens."""

from __future__ import annotations

from engine.sampler.build import build_rows
from engine.scheduler.output import ScheduledItem
from tests.support.sequences import make_sequence

EOS = frozenset({9, 2})


def test_rows_follow_items_and_choices() -> None:
    chunk = ScheduledItem(make_sequence("chunk"), 0, 5, 0)
    several = ScheduledItem(make_sequence("several", n=3, temperature=1.0), 0, 20, 3)
    single = ScheduledItem(make_sequence("single"), 0, 20, 1)
    rows = build_rows([chunk, several, single], EOS)
    assert [(row.logits_row, row.choice) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [row.output_position for row in rows] == [0, 0, 0, 0]
    assert rows[3].params is single.sequence.sampling


def test_positions_go_on_in_a_migrated_run_and_in_a_fork() -> None:
    migrated = make_sequence("m", output=((4, 5, 6),))
    fork = make_sequence("f", n=2, temperature=1.0).fork(1, 7)
    items = [ScheduledItem(migrated, 0, 23, 1), ScheduledItem(fork, 20, 1, 1)]
    rows = build_rows(items, EOS)
    assert [(row.output_position, row.choice) for row in rows] == [(3, 0), (1, 1)]


def test_history_is_built_only_for_penalties() -> None:
    output = ((30, 31),)
    plain = make_sequence("p", prompt=(20, 21), output=output)
    assert not build_rows([ScheduledItem(plain, 3, 1, 1)], EOS)[0].output_token_ids
    for setting in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        penalised = make_sequence("q", prompt=(20, 21), output=output, **{setting: 1.5})
        (row,) = build_rows([ScheduledItem(penalised, 3, 1, 1)], EOS)
        assert (tuple(row.prompt_token_ids), list(row.output_token_ids)) == ((20, 21), [30, 31])


def test_ending_tokens_are_banned_until_min_tokens() -> None:
    def banned(**settings: object) -> tuple[int, ...]:
        sequence = make_sequence("b", stop_token_ids=(40,), **settings)
        (row,) = build_rows([ScheduledItem(sequence, 0, 20, 1)], EOS)
        return tuple(row.banned_token_ids)

    assert banned() == ()
    assert banned(min_tokens=1) == (2, 9, 40)
    assert banned(min_tokens=2, output=((5,),)) == (2, 9, 40)
    assert banned(min_tokens=1, output=((5,),)) == ()
    assert banned(min_tokens=1, ignore_eos=True) == (40,)

"""Roles: who is asked for prompts, and who owns answers."""

import pytest

from core.worker_info import Role


@pytest.mark.parametrize(
    ("role", "prefill", "decode"),
    [(Role.PREFILL, True, False), (Role.DECODE, False, True), (Role.MIXED, True, True)],
)
def test_what_each_role_serves(role, prefill, decode):
    assert role.serves_prefill is prefill
    assert role.serves_decode is decode

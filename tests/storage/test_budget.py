"""How tables without a budget share one."""

from __future__ import annotations

import random

from embedrock.storage.budget import BudgetRequest, dues


def test_everybody_gets_the_same_but_what_he_cannot_use_and_no_less_than_he_needs():
    assert dues([BudgetRequest(0, 1 << 62)] * 4, 100) == [25] * 4
    assert dues([BudgetRequest(0, 10), BudgetRequest(0, 1 << 62), BudgetRequest(0, 1 << 62)], 100) == [10, 45, 45]
    assert dues([BudgetRequest(60, 1 << 62), BudgetRequest(0, 1 << 62), BudgetRequest(0, 1 << 62)], 100) == [60, 20, 20]
    assert dues([BudgetRequest(0, 10), BudgetRequest(0, 20)], 100) == [10, 20]
    assert dues([], 100) == []


def test_the_sum_is_never_more_than_the_whole_and_all_of_it_is_given_where_it_is_of_use():
    draw = random.Random(0)
    for _ in range(300):
        total, claims = draw.randrange(1, 10_000), []
        for _ in range(draw.randrange(1, 8)):
            least = draw.choice([0, 0, draw.randrange(total)])
            claims.append(BudgetRequest(least, least + draw.choice([0, draw.randrange(total), 1 << 62])))
        if sum(claim.least for claim in claims) > total:
            continue
        given = dues(claims, total)
        assert sum(given) <= total
        assert all(claim.least <= got <= claim.most for claim, got in zip(claims, given, strict=True))
        wanting = [got for claim, got in zip(claims, given, strict=True) if got < claim.most]
        assert not wanting or total - sum(given) < len(wanting)
        # Who has less than another one has all that he can use; who has more, what he needs.
        for claim, got in zip(claims, given, strict=True):
            assert got == claim.most or all(
                other <= got or other == its.least for its, other in zip(claims, given, strict=True)
            )

"""Every architecture whose sequence may be cut is exact with it; the others are refused by name."""

import pytest

from tests.sequence.test_proof import REFUSED
from tests.zoo import table
from tests.zoo.build import architectures, build_model
from tests.zoo.parity import deviations
from tplora.plan.architectures import proven_architectures

pytestmark = [pytest.mark.world, pytest.mark.slow]
PRECISIONS = {row.model_type: row.precision for row in proven_architectures()}


def _on_tokens(path, tp_size):
    return deviations(path, tp_size, is_cut=True)


@pytest.mark.parametrize("model_type", [one for one in architectures() if one not in REFUSED])
def test_two_ranks_on_their_tokens_are_one_process(world2, model_type, tmp_path):
    build_model(model_type).save_pretrained(tmp_path)
    for worst in world2.run(_on_tokens, str(tmp_path), 2):
        assert table.is_within(worst, PRECISIONS[model_type]), worst

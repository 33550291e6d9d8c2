"""Options that would be accepted and ignored are refused by name, once."""

import pytest
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig, KasaConfig

from tests.tiny import VOCAB, tiny_config
from tplora.errors import PlanError
from tplora.plan.build import build_plan


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_bias": True, "alora_invocation_tokens": [5]}, "lora.lora_bias: alora_invocation"),
        ({"lora_bias": True, "kasa_config": KasaConfig()}, "lora.lora_bias: kasa_config is given"),
        (
            {
                "lora_bias": True,
                "use_bdlora": BdLoraConfig(target_modules_bd_b=["q_proj"], nblocks=2),
            },
            "lora.lora_bias: use_bdlora is given",
        ),
        ({"rank_pattern": {"q_prj": 4}}, "lora.rank_pattern: 'q_prj' matches nothing"),
        ({"alpha_pattern": {"o_proj": 4}}, "lora.alpha_pattern: 'o_proj' matches nothing"),
        ({"alora_invocation_tokens": [5, -1]}, f"has no token -1, only 0 to {VOCAB - 1}"),
        ({"alora_invocation_tokens": [VOCAB]}, f"has no token {VOCAB}"),
    ],
)
def test_it_is_one_line(settings, words):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **settings)
    with pytest.raises(PlanError) as caught:
        build_plan(tiny_config("llama"), config, tp_size=2)
    (problem,) = caught.value.problems
    assert words in problem

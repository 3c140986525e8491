"""Workloads that ways of routing are compared on: four kinds of use, each at a load the instances bear with ease, at
one they bear, and at one they do not."""

from __future__ import annotations

from kvbm.core.errors import ConfigError
from kvbm.workload.generator import ConversationMix, generate
from kvbm.workload.trace import TraceRequest

INSTANCES = 4
"""The mixes' gaps between arrivals are for so many instances that prefill 10,000 tokens a second each; for others they
are scaled.
"""

LOADS = {"light": 0.5, "normal": 1.0, "overload": 2.0}
"""How much quicker requests come than the mix says."""

WORKLOADS: dict[str, ConversationMix] = {
    "conversation": ConversationMix(
        system_prompts=4,
        system_prompt_tokens=1_024,
        mean_turns=3.0,
        mean_user_tokens=5_500.0,
        mean_answer_tokens=350.0,
        mean_arrival_gap_s=0.62,
        mean_think_s=60.0,
    ),
    "tool-agents": ConversationMix(
        system_prompts=8,
        system_prompt_tokens=5_000,
        system_prompt_spread=2.0,
        mean_turns=12.0,
        mean_user_tokens=1_000.0,
        mean_answer_tokens=150.0,
        mean_arrival_gap_s=0.55,
        mean_think_s=5.0,
        long_think_share=0.08,
        mean_long_think_s=120.0,
        max_input_tokens=65_536,
    ),
    "shared-prompts": ConversationMix(
        system_prompts=48,
        system_prompt_tokens=6_000,
        system_prompt_spread=2.0,
        zipf_exponent=1.0,
        mean_turns=1.0,
        mean_user_tokens=1_500.0,
        mean_answer_tokens=250.0,
        mean_arrival_gap_s=0.085,
    ),
    "long-documents": ConversationMix(
        system_prompts=400,
        system_prompt_tokens=20_000,
        system_prompt_spread=3.0,
        zipf_exponent=0.8,
        mean_turns=3.0,
        mean_user_tokens=300.0,
        mean_answer_tokens=300.0,
        mean_arrival_gap_s=0.42,
        mean_think_s=30.0,
    ),
}


def check_workload(name: str, load: str) -> None:
    """Raises ConfigError: there is no workload or load of that name."""
    if name not in WORKLOADS:
        raise ConfigError(f"--workload {name!r}: there is none of that name; choose from {', '.join(WORKLOADS)}")
    if load not in LOADS:
        raise ConfigError(f"--load {load!r}: there is none of that name; choose from {', '.join(LOADS)}")


def workload(name: str, load: str, seed: int, requests: int, instances: int = INSTANCES) -> list[TraceRequest]:
    """Requests of one workload. Raises ConfigError: there is none of that name."""
    check_workload(name, load)
    mix = WORKLOADS[name]
    gap_s = mix.mean_arrival_gap_s * INSTANCES / instances / LOADS[load]
    return generate(seed, requests, mix._replace(mean_arrival_gap_s=gap_s))

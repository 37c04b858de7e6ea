"""The scorer of GSM8K and of the tiny arithmetic tasks, which use the same answer format."""

from trackway.scoring import gsm8k
from trackway.wire.reward import ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward


class Gsm8kScorer:
    """Compares the final answer with the ground truth. `strict`, as verl does, is the default."""

    info = ScorerInfo(
        name="gsm8k",
        data_sources=["openai/gsm8k", "trackway/tiny_math"],
        methods=[method.value for method in gsm8k.Method],
        description=(
            "1.0 when the final answer equals the ground truth, else 0.0. strict: the last '#### <number>'; "
            "flexible: the last number; normalized: the last '####' number compared by value."
        ),
    )

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """`correct` is the score. `answered` is 1.0 when the text has a final answer."""
        chosen = gsm8k.Method(method)
        correct = gsm8k.score(request.solution_str, request.ground_truth, chosen)
        answer = gsm8k.extract(request.solution_str, chosen)
        components = {"correct": correct, "answered": float(answer is not None)}
        return Reward(score=correct, components=components, answer=answer)

"""Proofs that pass with any weights, or with none."""

from trackway.wire.weights import Probe, WeightProof

ANY_PROOF = WeightProof(probes=[Probe(token_ids=[5, 6], positions=[1], logprobs=[-1.0])], tolerance=100.0)
"""Passes with any finite weights."""
WRONG_PROOF = WeightProof(probes=[Probe(token_ids=[3, 4, 5], positions=[1, 2], logprobs=[-99.0, -99.0])])
"""Passes with no model's weights."""

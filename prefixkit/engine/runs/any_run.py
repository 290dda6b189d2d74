"""What grows sequences of the tree, from the logits after a prompt to its end."""

from __future__ import annotations

from prefixkit.engine.runs.beam_run import BeamRun
from prefixkit.engine.runs.sample_run import SampleRun

# A sample streams: the tokens sampled are its own, so several may be accepted at once.  A beam search decides at each
# step how its sequences go on.
Run = SampleRun | BeamRun

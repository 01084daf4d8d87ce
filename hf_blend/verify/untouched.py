# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""After a blended request the model has the hooks, attributes, config, weights and logits that it had before."""

from .base import Check, Outcome, violations
from .subject import ModelUnderTest
from .traces import differences, traces


class Untouched(Check):
    """After a prefill, after a generate, and after a cache that was made and never used."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Number of things that differ; 0 is allowed."""
        subject.blend(subject.prompts, 0.3)  # what is done once per model, such as the probe, is not counted
        before = traces(subject)
        got = subject.blend(subject.prompts, 0.3)
        if not any(got.cache.report.chosen_columns):
            return violations(["nothing was blended, so nothing was shown"])
        wrong = differences(before, traces(subject))
        cache = subject.cache(0.3)
        inputs = subject.inputs(cache, subject.prompts)
        inputs.pop("position_ids")
        subject.model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
        wrong += differences(before, traces(subject))
        unused = subject.cache(0.3)
        unused.get_seq_length()
        del unused
        return violations([*wrong, *differences(before, traces(subject))])

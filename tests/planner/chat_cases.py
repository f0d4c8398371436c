"""Samples of conversations."""

from omnibal.data.sample import Sample, Turn


def sample_of(
    *turns: tuple[str, str], system: str | None = None, greeting: str | None = None
) -> Sample:
    """A conversation of (question, answer) turns, with one image for each `<image>`."""
    images = sum(question.count("<image>") for question, _ in turns)
    return Sample(
        identity="x",
        source="x",
        where="x.jsonl: line 1",
        images=tuple(f"{k}.png" for k in range(images)),
        turns=tuple(Turn(question, answer, None) for question, answer in turns),
        system=system,
        greeting=greeting,
    )

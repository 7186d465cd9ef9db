"""The probes that *evaluate* asks. A fork's own stand in a module beside these, and are added here."""

from __future__ import annotations

from grpo.loophole_probes import Probe, answers, forms, programs

PROBES: tuple[Probe, ...] = (*answers.PROBES, *forms.PROBES, *programs.PROBES)

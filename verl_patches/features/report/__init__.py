"""What a finished run shows: its metrics read back, a summary, and a figure."""

from verl_patches.features.report.metrics import STAGES, ReportError, StepRecord, read_records
from verl_patches.features.report.summary import RunFacts, summarise

__all__ = ["STAGES", "ReportError", "RunFacts", "StepRecord", "read_records", "summarise"]

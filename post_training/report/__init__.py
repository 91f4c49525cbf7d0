"""What a finished run shows: its metrics read back, a summary, and a picture."""

from post_training.report.metrics import STAGES, ReportError, StepRecord, read_records
from post_training.report.summary import RunFacts, summarise

__all__ = ["STAGES", "ReportError", "RunFacts", "StepRecord", "read_records", "summarise"]

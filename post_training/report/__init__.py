"""Reports of a run: reads its metrics back, summarises them, and draws pictures."""

from post_training.report.metrics import STAGES, LoggedStep, ReportError, read_records
from post_training.report.summary import RunFacts, summarise

__all__ = ["STAGES", "ReportError", "RunFacts", "LoggedStep", "read_records", "summarise"]

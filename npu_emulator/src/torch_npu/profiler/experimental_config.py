class ProfilerLevel:
    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"
    Level_none = "Level_none"


class AiCMetrics:
    PipeUtilization = "ACL_AICORE_PIPE_UTILIZATION"
    ArithmeticUtilization = "ACL_AICORE_ARITHMETIC_UTILIZATION"
    Memory = "ACL_AICORE_MEMORY_BANDWIDTH"
    AiCoreNone = "ACL_AICORE_NONE"


class ExportType:
    Db = "db"
    Text = "text"


class _ExperimentalConfig:
    """Options for the hardware's own counters, kept as they are."""

    def __init__(self, **options):
        self.options = options

    @property
    def exports_database(self) -> bool:
        wanted = self.options.get("export_type", ExportType.Text)
        return ExportType.Db in (wanted if isinstance(wanted, (list, tuple)) else [wanted])

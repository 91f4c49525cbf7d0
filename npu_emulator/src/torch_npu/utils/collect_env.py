def get_cann_version() -> str:
    return "8.2.RC1"

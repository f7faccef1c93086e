"""What can be wrong with what is to be analysed."""


class AnalysisError(ValueError):
    """The files, the disk or the memory do not fit; the message is one clear line."""

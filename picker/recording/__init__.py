"""Recordings of decisions and their replay: lines, privacy, the file, the comparison. A decision is
recorded as `picker.decisions` has it; nothing here decides but `replay` by the picker's own
scheduler.
"""

"""placeholder"""

SCENARIOS = {}

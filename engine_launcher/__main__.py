"""``python -m engine_launcher`` is ``fleetgate engines``."""

from engine_launcher.cli import engines

if __name__ == "__main__":
    engines(prog_name="fleetgate engines")

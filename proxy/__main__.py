"""``python -m proxy`` is ``fleetgate proxy``."""

from proxy.cli import proxy_command

proxy_command(prog_name="fleetgate proxy")

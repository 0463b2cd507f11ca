"""The demo: rollouts in flight through one URL while the weights behind it are replaced, with proof for every token."""

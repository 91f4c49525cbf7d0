"""PPO's critic."""

"""The rollout side: sends each rollout to a replica that acked its version. Not written yet."""

"""The trackers and their follower."""

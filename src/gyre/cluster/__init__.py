"""Workers on many devices: starting and watching them, a pool of engines, a group of trainer
ranks."""

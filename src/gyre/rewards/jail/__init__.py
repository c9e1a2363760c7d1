"""The inside of the sandbox: what runs in the zygote and in the processes it forks. Standard library only."""

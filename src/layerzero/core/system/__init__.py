"""What the operating system does to a process: forks, memory, control groups, files, threads."""

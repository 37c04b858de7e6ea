"""`python -m trackway.main_ppo`: verl's entry point on this machine. The work is in `trackway.deploy`."""

from trackway.deploy.commands.main_ppo import main

if __name__ == "__main__":
    main()

"""The console: a read-only web page over run folders, for people who look into a run.

Imported by `trackway.deploy.commands.console` alone. It reads the files of a run and asks no service, so it also shows
a run that has ended or died. It writes nothing, and no run needs it.
"""

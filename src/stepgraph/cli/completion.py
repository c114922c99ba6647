HELP = "x"


def arguments(p):
    pass


def run(a):
    return 0

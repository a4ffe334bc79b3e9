import logging


def init_logger(name: str):
    return logging.getLogger(name)

"""Every option, for config files: `from configs.schema import Config, ...`. options/schema.py has them."""

from options.schema import *  # noqa: F403

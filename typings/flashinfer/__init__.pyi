# What stacks use of FlashInfer for MLA decode, and nothing else of it.
from . import decode as decode
from . import mla as mla

__version__: str

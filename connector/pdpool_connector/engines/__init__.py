"""Data planes: what moves pages and aux rows from one process's memory to another's.

Every engine fulfils `base.Engine`; the runtime knows nothing else of them.
"""

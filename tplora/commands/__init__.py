"""The commands, by family: what each takes, and the calls that it comes to.

    arguments    what several commands take
    training     finetune, plan, bench, check: of a recipe
    results      export, verify, generate, push: of a run
    adapters     inspect: of any adapter
    convert      of any adapter, too, with the words that it takes
    about        recipes, models, report: of tplora itself

Imports stand inside the commands, so that ``tplora --help`` is instant.
"""

"""Explorer: a page on which two layouts are typed, and their move is drawn, proved and listed as one types.

In reading order:

- `reading`: a layout in sentences;
- `spellings`: a layout as DTensor and JAX write it;
- `question`: the texts that were typed, read as layouts;
- `facts`: layouts and plans as values for JSON;
- `code`: two layouts and their plan as Python;
- `answer`: the facts about a question, the quickest first;
- `page`: the page, which draws them, and a page of one plan;
- `workers`: processes that answer, and may be ended;
- `server`: the page on the loopback.
"""

"""Views of a graph: a table, DOT text, an SVG drawing. Works on anything with nodes; independent of graph classes."""

from stepgraph.draw.graphviz import dot as dot
from stepgraph.draw.names import extents as extents, kind as kind, loss_names as loss_names
from stepgraph.draw.names import parameter_names as parameter_names, unique_names as unique_names
from stepgraph.draw.notebook import graph_html as graph_html, html_table as html_table, styled as styled
from stepgraph.draw.picture import svg as svg
from stepgraph.draw.tables import Listing as Listing, lines as lines, size as size, table as table, text as text

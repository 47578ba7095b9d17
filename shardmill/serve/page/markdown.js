// Turns Markdown into HTML, in a worker: a text made to take for ever can be given up without harm to the page.
import {marked} from './marked.esm.js';

const MOST = 500_000; // characters of HTML: a table of few characters may have millions of cells
const SIGNS = {'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;'};
const escape = (text) => text.replace(/[&<>"]/g, (sign) => SIGNS[sign]);

marked.use({
  renderer: {
    html: ({text, block}) => (block ? `<pre>${escape(text)}</pre>` : escape(text)), // the model's own, shown as text
    image: ({raw}) => escape(raw), // to load it would tell another server
  },
});

onmessage = ({data}) => {
  let html = null;
  try {
    html = marked.parse(data);
  } catch {} // nested too deeply
  postMessage(html !== null && html.length <= MOST ? html : null);
};

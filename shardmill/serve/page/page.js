// The page to chat with: a conversation, a pad on which a base model continues a text, or what an encoder finds.
import {content, joined, picture, read} from './images.js';

const $ = (id) => document.getElementById(id);
const make = (tag, name = '', ...content) => {
  const made = Object.assign(document.createElement(tag), {className: name});
  made.append(...content.filter((one) => one || one === 0));
  return made;
};
const say = (text) => ($('status').textContent = text);
const state = {messages: [], text: '', settings: {}, result: null, images: []}; // what a reload keeps
let facts = {}; // of the model, from /v1/models
let place = ''; // where the state is kept
let key = sessionStorage.getItem('key') ?? '';
let stopper = null; // of the answer under way

function keep() {
  state.text = $('text').value;
  try {
    if (place) localStorage.setItem(place, JSON.stringify(state));
  } catch {
    say('This is too long for the browser to keep: a reload would forget it.');
  }
}

// --- Requests

async function ask(path, body) {
  const headers = {...(key && {Authorization: `Bearer ${key}`}), ...(body && {'Content-Type': 'application/json'})};
  const sent = {method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body), signal: stopper?.signal};
  const answer = await fetch(path, sent).catch((error) => {
    throw error.name === 'AbortError' ? error : new Error('The server can’t be reached. Start it again, then retry.');
  });
  if (answer.ok) return answer;
  if (answer.status === 401) $('lock').hidden = false;
  throw new Error((await answer.json().catch(() => null))?.error?.message ?? `The server says ${answer.status}.`);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ''; ; ) {
    const {done, value} = await reader.read().catch((error) => {
      if (error.name === 'AbortError') throw error;
      return {done: true};
    });
    if (done) throw new Error('The server ended before its answer did.');
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts.filter((one) => one.startsWith('data: '))) { // others keep the connection alive
      if (part === 'data: [DONE]') return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'seed', 'max_tokens'];
const thinking = () => ['enable_thinking', 'thinking'].find((name) => facts.variables.includes(name));

// What the settings add to a request.
function wanted() {
  const given = state.settings;
  const body = {stream: true, stream_options: {include_usage: true}};
  body.shardmill = {figures: true, drafter: given.drafter || facts.drafters[0]};
  for (const name of NUMBERS) if (given[name]) body[name] = Number(given[name]);
  if (given.thinking && thinking()) body.chat_template_kwargs = {[thinking()]: given.thinking === 'true'};
  try {
    if (given.tools && facts.calls) body.tools = JSON.parse(given.tools);
  } catch (error) {
    throw new Error(`Settings, functions: ${error.message}`);
  }
  return body;
}

// Does work that may be stopped; returns what went wrong.
async function during(work) {
  stopper = new AbortController();
  busy();
  say('Answering …');
  const wrong = await work().then(() => '', (error) => (error.name === 'AbortError' ? 'Stopped.' : error.message));
  stopper = null;
  say(wrong || 'Answered.');
  busy();
  keep();
  return wrong;
}

// Streams an answer into `said`, with what it took; `changed` draws it.
async function stream(path, more, said, changed) {
  said.wrong = 'This answer was interrupted.'; // if the page is left before its end
  keep();
  said.wrong = await during(async () => {
    const body = {model: $('model').value, ...more, ...wanted()};
    for await (const {choices, usage, shardmill} of events(await ask(path, body))) {
      for (const choice of choices) add(said, choice);
      if (shardmill) said.took = taken(shardmill, body.shardmill.drafter);
      if (usage) {
        const {cached_tokens: kept, image_tokens: seen} = usage.prompt_tokens_details;
        Object.assign(said.took, {read: usage.prompt_tokens, kept, seen});
      }
      changed();
    }
  });
  keep();
  changed();
}

function add(said, {text, delta = {content: text}}) {
  said.content += delta.content ?? '';
  if (delta.reasoning_content) said.thought = (said.thought ?? '') + delta.reasoning_content;
  for (const {index, id, function: part} of delta.tool_calls ?? []) {
    said.calls ??= [];
    said.calls[index] ??= {id, type: 'function', function: {name: part.name, arguments: ''}};
    said.calls[index].function.arguments += part.arguments;
  }
}

function taken(figures, drafter) {
  const sum = (list) => list.reduce((one, other) => one + other, 0);
  const {tokens, passes, prefill_seconds: before, decode_seconds: seconds, finish_reason: ended} = figures;
  const drafts = [sum(figures.accepted), sum(figures.drafted)];
  return {tokens: tokens.length, passes, drafts, before, seconds, ended, drafter, engine: facts.engine};
}

// --- Drawing

const MARKDOWN = {
  ALLOWED_TAGS: 'p br hr em strong del code pre blockquote a ul ol li h1 h2 h3 h4 h5 h6 table thead tbody tr th td'.split(' '),
  ALLOWED_ATTR: ['href', 'title', 'align', 'start'],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const PATIENCE = 2000; // milliseconds for the Markdown of a text; what takes longer is shown as it is
const waiting = new Map(); // element -> its newest text
const plain = new WeakSet(); // elements whose Markdown was given up
let worker = null;
let drawing = false;
const policy = (window.trustedTypes ?? {createPolicy: (_, rules) => rules}).createPolicy('page', {createScriptURL: (url) => url});

function draw(element, text) {
  waiting.set(element, text);
  if (!drawing) drawNext();
}

function drawNext() {
  drawing = waiting.size > 0;
  if (!drawing) return;
  const [element, text] = waiting.entries().next().value;
  waiting.delete(element);
  const start = performance.now();
  const done = (html) => {
    clearTimeout(timer);
    if (html === null) plain.add(element);
    atEnd(() => element.replaceChildren(html === null ? make('div', 'plain', text) : DOMPurify.sanitize(html, MARKDOWN)));
    for (const link of element.querySelectorAll('a')) Object.assign(link, {target: '_blank', rel: 'noopener noreferrer'});
    for (const code of element.querySelectorAll('pre')) code.tabIndex = 0; // it scrolls
    setTimeout(drawNext, 2 * (performance.now() - start)); // a long text leaves two thirds of the time to its reader
  };
  const timer = setTimeout(() => {
    worker.terminate();
    worker = null;
    done(null);
  }, PATIENCE);
  if (plain.has(element)) return done(null);
  worker ??= new Worker(policy.createScriptURL('page/markdown.js'), {type: 'module'});
  worker.onmessage = ({data}) => done(data);
  worker.postMessage(text);
}

// Changes the page; who has seen its end goes on seeing it.
function atEnd(change, now = innerHeight + scrollY > document.documentElement.scrollHeight - 60) {
  change();
  if (now) scrollTo(0, document.documentElement.scrollHeight);
}

const spelled = ({function: {name, arguments: given}}) => `${name}(${given})`;

function show(said) {
  const shown = make('article', said.role);
  shown.ariaLabel = {user: 'You', tool: 'Result of a call'}[said.role] ?? 'The model';
  atEnd(() => $('log').append(shown), said.role !== 'assistant');
  if (said.role !== 'assistant') return shown.append(...(said.images ?? []).map(picture), said.content);
  const [thought, text, calls, foot] = [make('details'), make('div', 'text'), make('div'), make('footer')];
  const [title, inside] = [make('summary'), make('div', 'plain')];
  thought.append(title, inside);
  shown.append(thought, text, calls, foot);
  const changed = () => {
    thought.hidden = !said.thought;
    title.textContent = stopper && !said.content ? 'Thinking …' : 'Thought';
    inside.textContent = said.thought ?? '';
    if (said.content) draw(text, said.content);
    atEnd(() => calls.replaceChildren(...(said.calls ?? []).map((call) => make('pre', 'call', spelled(call)))));
    atEnd(() => foot.replaceChildren(...notes(said)));
  };
  changed();
  return changed;
}

// Adds the images in files to the next message.
async function show_files(files) {
  const sent = [state, ...state.messages].flatMap(({images}) => images ?? []).length;
  try {
    state.images.push(...await read([...files], facts.images - sent, kind === chat && facts.images));
    say('');
    keep();
  } catch (error) {
    say(error.message);
  }
  draw_waiting();
}

// Draws the images of the next message; a click leaves one out.
function draw_waiting() {
  $('waiting').replaceChildren(...state.images.map((src, i) => {
    const button = Object.assign(make('button', '', picture(src, i)), {type: 'button', title: 'Leave this image out'});
    button.addEventListener('click', () => {
      state.images.splice(i, 1);
      draw_waiting();
      keep();
      $('text').focus();
    });
    return button;
  }));
}

// Why an answer was as fast as it was, and what went wrong.
function notes({took, wrong}) {
  const line = took && [
    took.drafts[1] && `${((took.tokens - 1) / took.passes).toFixed(1)} tokens a pass, as ${took.drafts.join(' of ')} drafts of ${took.drafter} were accepted`,
    !took.drafts[1] && 'no drafts',
    engine(took.engine),
    `${took.tokens} tokens`,
    `${took.before.toFixed(1)} s for the ${took.read} before them${took.kept ? `, of which ${took.kept} were kept` : ''}`,
    took.seen && `${took.seen} of images`,
    {length: 'ended at the most tokens', context: 'ended, as the context is full'}[took.ended],
  ];
  const speed = took?.seconds > 0 && `${((took.tokens - 1) / took.seconds).toFixed(1)} tokens/s`;
  const told = took && make('p', 'took', speed && make('strong', '', speed), speed && ' · ', line.filter(Boolean).join(' · '));
  return [told, wrong && !stopper && make('p', 'wrong', wrong)].filter(Boolean);
}

const engine = (name) => ({coreml: 'Core ML'})[name] ?? `${name} engine`;

// --- What models do: each kind draws its state, sends a text, says whether its last answer can be had anew, and clears

// The calls whose results the model waits for; the text field takes them one by one.
function open() {
  const at = state.messages.findLastIndex(({role}) => role === 'assistant');
  const answered = state.messages.slice(at + 1).map((one) => one.tool_call_id);
  return (state.messages[at]?.calls ?? []).filter(({id}) => !answered.includes(id));
}

const chat = {
  label: () => (open().length ? `Result of ${spelled(open()[0])}` : 'Message'),
  draw() {
    const hint = make('p', 'hint', 'Enter sends, Shift and Enter begin a line, Escape stops an answer.');
    $('log').replaceChildren(...(state.messages.length ? [] : [hint]));
    state.messages.forEach(show);
  },
  send(text) {
    const [call] = open();
    if (!text.trim() && !state.images.length) return;
    if (!state.messages.length) $('log').replaceChildren();
    $('text').value = '';
    const images = call ? [] : state.images.splice(0);
    draw_waiting();
    state.messages.push(call ? {role: 'tool', tool_call_id: call.id, content: text} : {role: 'user', content: text, images});
    show(state.messages.at(-1));
    if (open().length) busy();
    else this.answer();
  },
  answer() {
    const asked = state.settings.system ? [{role: 'system', content: state.settings.system}] : [];
    for (const one of state.messages) {
      const {role, thought, calls, tool_call_id} = one;
      const [said, before] = [content(one), asked.at(-1)];
      const message = {role, content: said || (thought || calls ? null : ''), tool_call_id, tool_calls: calls};
      if (role === 'user' && before?.role === 'user') before.content = joined(before.content, said); // it had no answer
      else if (role !== 'assistant' || said || thought || calls) asked.push({...message, reasoning_content: thought});
    }
    const said = {role: 'assistant', content: ''};
    state.messages.push(said);
    stream('v1/chat/completions', {messages: asked}, said, show(said));
  },
  retry() {
    state.messages.pop();
    $('log').lastChild.remove();
    this.answer();
  },
  again: () => state.messages.at(-1)?.role === 'assistant' && !open().length,
  clear() {
    [state.messages, state.images] = [[], []];
    draw_waiting();
  },
};

const pad = {
  label: () => 'Text, which the model continues (Control or Command and Enter)',
  draw: () => $('log').replaceChildren(...(state.result ? notes(state.result) : [])),
  send(text) {
    const said = (state.result = {content: '', before: text});
    stream('v1/completions', {prompt: text}, said, () => {
      $('text').value = text + said.content;
      $('text').scrollTop = $('text').scrollHeight;
      this.draw();
    });
  },
  retry() {
    this.send(state.result.before);
  },
  again: () => state.result && $('text').value === state.result.before + state.result.content,
  clear: () => (state.result = null),
};

const lines = (text) => text.split('\n').filter((line) => line.trim());
const product = (one, other) => one.reduce((sum, value, i) => sum + value * other[i], 0);
const READERS = { // task -> address, request, and what is drawn of the answer: spans, or shares by name
  'token-classification': ['v1/label', (text) => ({input: text}), ({data}) => ({spans: data[0].spans})],
  'text-classification': ['v1/label', (text) => ({input: text}), ({data}) => ({shares: data[0].labels.map((one) => [one.label, one.score])})],
  'feature-extraction': ['v1/embeddings', (text) => ({input: lines(text)}), ({data: [first, ...others]}, text) => ({
    shares: others.map(({embedding}, i) => [lines(text)[i + 1], product(first.embedding, embedding)]),
  })],
  'text-ranking': ['v1/rerank', (text) => ({query: lines(text)[0], documents: lines(text).slice(1)}), ({results}) => ({
    shares: results.map(({document, relevance_score: score}) => [document.text, score]),
  })],
};

const reader = (compares, [path, request, drawn]) => ({
  label: () => (compares ? 'A text, and below it, one a line, the texts to compare it with' : 'Text to read'),
  async send(text) {
    const start = performance.now();
    state.result = {text};
    state.result.wrong = await during(async () => {
      const answer = await (await ask(path, {model: $('model').value, ...request(text)})).json();
      const seconds = ((performance.now() - start) / 1000).toFixed(2);
      const took = `${answer.usage.total_tokens} tokens in ${seconds} s · ${engine(facts.engine)}`;
      Object.assign(state.result, {took, ...drawn(answer, text)});
    });
    keep();
    this.draw();
  },
  draw() {
    const {text, took, wrong, spans, shares} = state.result ?? {};
    const bars = shares?.map(([name, share]) => {
      const meter = Object.assign(make('meter'), {max: 1, value: share, ariaLabel: name});
      return make('li', '', meter, make('strong', '', share.toFixed(3)), ` ${name}`);
    });
    const shown = [spans && marked(text, spans), bars && make('ol', 'bars', ...bars), took && make('p', 'took', took)];
    $('log').replaceChildren(...[...shown, wrong && make('p', 'wrong', wrong)].filter(Boolean));
  },
  again: () => false,
  clear: () => (state.result = null),
});

function marked(text, spans) {
  const signs = [...text]; // the server counts characters, of which some are two for JavaScript
  const types = [...new Set(spans.map(({type}) => type))];
  const shown = make('p', 'plain');
  let at = 0;
  for (const {start, end, type, score} of spans) {
    const mark = make('mark', `type-${types.indexOf(type) % 5}`, signs.slice(start, end).join(''), make('small', '', ` ${type} ${score.toFixed(2)}`));
    shown.append(signs.slice(at, start).join(''), mark);
    at = end;
  }
  shown.append(signs.slice(at).join(''), spans.length ? '' : make('p', 'hint', 'Nothing was found in it.'));
  return shown;
}

// --- The page

let kind = chat;

function busy() {
  $('send').hidden = $('new').disabled = $('log').ariaBusy = Boolean(stopper);
  $('stop').hidden = !stopper;
  $('retry').hidden = Boolean(stopper) || !kind.again();
  $('asked').textContent = kind.label();
  if (document.activeElement === document.body && !matchMedia('(pointer: coarse)').matches) $('text').focus();
}

function send(event) {
  event.preventDefault();
  if (stopper || $('ask').hidden) return;
  if (!$('settings').checkValidity()) unfold(true);
  if ($('settings').reportValidity()) kind.send($('text').value);
}

function unfold(shown) {
  $('settings').hidden = !shown;
  $('unfold').ariaExpanded = String(shown);
  if (shown) $('settings').scrollIntoView();
}

async function start() {
  let health = {};
  for (;;) {
    health = await fetch('health').then((answer) => answer.json()).catch(() => ({}));
    if (health.status === 'ok') break;
    const loading = `loading ${health.name || 'the programs'}, ${health.part} of ${health.of}`;
    $('engine').textContent = health.status === 'starting' ? loading : 'the server can’t be reached';
    await new Promise((done) => setTimeout(done, 500));
  }
  $('engine').textContent = '';
  const {data} = await (await ask('v1/models')).json();
  facts = data[0].shardmill;
  sessionStorage.setItem('key', key);
  place = `shardmill ${data[0].id}`;
  $('name').textContent = document.title = data[0].id;
  const context = facts.context && `${facts.context} tokens of context`;
  $('engine').textContent = [engine(facts.engine), context, health.check].filter(Boolean).join(' · ');
  $('ungated').replaceChildren(...(health.ungated ?? []).map((line) => make('li', '', line)));
  $('ungated').hidden = !health.ungated;
  $('model').replaceChildren(...data.map(({id}) => new Option(id)));
  $('model').hidden = data.length < 2;
  const compares = ['feature-extraction', 'text-ranking'].includes(facts.task);
  kind = {chat, completion: pad}[facts.task] ?? reader(compares, READERS[facts.task]);
  if (kind === pad) state.settings = {temperature: '0', max_tokens: '128'};
  try {
    Object.assign(state, JSON.parse(localStorage.getItem(place)));
  } catch {} // of something else at this address
  $('text').value = state.text;
  document.body.className = kind === chat ? 'chat' : 'pad';
  if (kind !== chat) document.body.insertBefore($('ask'), $('log'));
  if (facts.drafters) {
    const {elements} = $('settings');
    elements.drafter.replaceChildren(...facts.drafters.map((one) => new Option(one)));
    for (const [name, value] of Object.entries(state.settings)) if (value && elements[name]) elements[name].value = value;
    $('system').hidden = kind !== chat;
    $('thinking').hidden = kind !== chat || !thinking();
    $('tools').hidden = kind !== chat || !facts.calls;
  }
  $('unfold').hidden = !facts.drafters;
  $('new').hidden = $('ask').hidden = false;
  $('add').hidden = kind !== chat || !facts.images;
  draw_waiting();
  kind.draw();
  busy();
  scrollTo(0, document.documentElement.scrollHeight);
}

const begin = () => start().catch((error) => (say(error.message), ($('ask').hidden ? $('engine').textContent = error.message : '')));

$('ask').addEventListener('submit', send);
$('stop').addEventListener('click', () => stopper?.abort());
$('retry').addEventListener('click', () => kind.retry());
$('unfold').addEventListener('click', () => unfold($('settings').hidden));
$('settings').addEventListener('submit', (event) => event.preventDefault());
$('settings').addEventListener('input', () => {
  state.settings = Object.fromEntries(new FormData($('settings')));
  keep();
});
$('new').addEventListener('click', () => {
  if (!confirm('Forget what is on this page?')) return;
  $('text').value = '';
  kind.clear();
  kind.draw();
  keep();
  say('');
  busy();
  $('text').focus();
});
$('text').addEventListener('input', busy);
$('text').addEventListener('paste', (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  show_files(event.clipboardData.files);
});
document.addEventListener('dragover', (event) => event.dataTransfer.types.includes('Files') && event.preventDefault());
document.addEventListener('drop', (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault(); // otherwise the browser would leave the page for the file
  show_files(event.dataTransfer.files);
});
$('add').addEventListener('click', () => $('files').click());
$('files').addEventListener('change', () => {
  show_files([...$('files').files]);
  $('files').value = ''; // so that the same file can be chosen again
});
$('text').addEventListener('keydown', (event) => {
  const sends = kind === chat ? !event.shiftKey : event.ctrlKey || event.metaKey;
  if (event.key === 'Enter' && sends && !event.isComposing) send(event);
});
document.addEventListener('keydown', (event) => event.key === 'Escape' && stopper?.abort());
$('lock').addEventListener('submit', (event) => {
  event.preventDefault();
  key = $('key').value;
  $('lock').hidden = true;
  begin();
});
document.addEventListener('visibilitychange', () => document.hidden && keep());
begin();

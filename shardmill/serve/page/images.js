// Images of a conversation, as addresses that hold them: read from files, shown, and said to the model.

const FORMATS = ['image/png', 'image/jpeg', 'image/webp', 'image/gif'];

export function picture(src, i) {
  return Object.assign(document.createElement('img'), {src, alt: `Image ${i + 1}`});
}

// Returns the addresses of the images in some files, of which a conversation has room for so many.
export function read(files, room, most) {
  if (!most) throw new Error('This model takes no images.');
  if (files.some(({type}) => !FORMATS.includes(type))) throw new Error('Only PNG, JPEG, WebP and GIF images can be sent.');
  if (files.length > room) throw new Error(`A conversation may have ${most} images; “New” begins another.`);
  return Promise.all(files.map((file) => new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} can’t be read.`));
    reader.readAsDataURL(file);
  })));
}

const parts = (content) => (typeof content === 'string' ? [{type: 'text', text: content}] : content);

// What a message says to the model: its text, or its images and then its text.
export function content({content: text, images = []}) {
  const shown = images.map((url) => ({type: 'image_url', image_url: {url}}));
  return shown.length ? [...shown, ...(text ? parts(text) : [])] : text;
}

// What two messages in a row say.
export function joined(one, other) {
  const plain = typeof one === 'string' && typeof other === 'string';
  return plain ? `${one}\n\n${other}` : [...parts(one), ...parts(other)];
}

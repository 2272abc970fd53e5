// Runs an ONNX model with onnxruntime-node: node run_model.cjs REQUEST.json
//
// REQUEST: {"model": path, "output": folder, "feeds": [{"name", "dtype", "dims", "file"}]}.
// Writes each float32 output as OUTPUT/NAME.bin and prints [{"name", "dims"}].
const fs = require("node:fs");
const path = require("node:path");
const ort = require("onnxruntime-node");

const ARRAYS = { int64: BigInt64Array, int32: Int32Array, float32: Float32Array };

async function main() {
  const request = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
  const session = await ort.InferenceSession.create(request.model);
  const feeds = {};
  for (const { name, dtype, dims, file } of request.feeds) {
    const bytes = fs.readFileSync(file);
    const data = new ARRAYS[dtype](bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
    feeds[name] = new ort.Tensor(dtype, data, dims);
  }
  const results = await session.run(feeds);
  const described = [];
  for (const [name, { data, dims }] of Object.entries(results)) {
    const file = path.join(request.output, `${described.length}.bin`);
    fs.writeFileSync(file, Buffer.from(data.buffer, data.byteOffset, data.byteLength));
    described.push({ name, dims, file });
  }
  console.log(JSON.stringify(described));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});

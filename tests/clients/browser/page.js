// Makes each call twice, of which the second is denied, and reports what the client shows.
import { create, createFileRegistry } from "@bufbuild/protobuf";
import { FileDescriptorProtoSchema } from "@bufbuild/protobuf/wkt";
import { Code, createClient } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { GrpcWebClientBase, MethodDescriptor, MethodType } from "grpc-web";

const type = "test.Text";
const file = create(FileDescriptorProtoSchema, {
  name: "test.proto",
  package: "test",
  syntax: "proto3",
  messageType: [{ name: "Text", field: [{ name: "text", jsonName: "text", number: 1, type: 9, label: 1 }] }],
  service: [
    {
      name: "Echo",
      method: [
        { name: "Once", inputType: `.${type}`, outputType: `.${type}` },
        { name: "Twice", inputType: `.${type}`, outputType: `.${type}`, serverStreaming: true },
      ],
    },
  ],
});
const Echo = createFileRegistry(file, () => undefined).getService("test.Echo");

const details = (metadata) =>
  ["grpc-retry-pushback-ms", "grpc-status-details-bin"].filter((name) => metadata?.[name] ?? metadata?.get?.(name));
const shown = (code, message, metadata) => `${code}: ${message}${details(metadata).map((name) => `, ${name}`).join("")}`;

const connect = (transport) => ({
  async unary(url, headers) {
    const { text } = await createClient(Echo, transport(url)).once({ text: "hi" }, { headers });
    return text;
  },
  async stream(url, headers) {
    const texts = [];
    for await (const { text } of createClient(Echo, transport(url)).twice({ text: "hi" }, { headers })) texts.push(text);
    return `${texts.length} messages`;
  },
  error: (error) => shown(Code[error.code], error.rawMessage, error.metadata),
});

const method = (name, kind) =>
  new MethodDescriptor(
    `/test.Echo/${name}`,
    kind,
    Object,
    Object,
    (text) => new Uint8Array([10, text.length, ...new TextEncoder().encode(text)]),
    (bytes) => new TextDecoder().decode(bytes.slice(2)),
  );
const grpcWeb = (format) => ({
  unary: (url, headers) =>
    new Promise((resolve, reject) => {
      const once = method("Once", MethodType.UNARY);
      const done = (error, text) => (error ? reject(error) : resolve(text));
      new GrpcWebClientBase({ format }).rpcCall(`${url}/test.Echo/Once`, "hi", headers, once, done);
    }),
  stream: (url, headers) =>
    new Promise((resolve, reject) => {
      let messages = 0;
      const twice = method("Twice", MethodType.SERVER_STREAMING);
      const stream = new GrpcWebClientBase({ format }).serverStreaming(`${url}/test.Echo/Twice`, "hi", headers, twice);
      stream.on("data", () => messages++);
      stream.on("error", reject);
      stream.on("end", () => setTimeout(() => resolve(`${messages} messages`), 100));
    }),
  error: (error) => shown(error.code, error.message, error.metadata),
});

const clients = {
  "connect-web": connect((baseUrl) => createGrpcWebTransport({ baseUrl })),
  "grpc-web, binary": grpcWeb("binary"),
  "grpc-web, text": grpcWeb("text"),
};

const report = (result) =>
  fetch("/result", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(result) });

async function run() {
  for (const { cors, place, url } of servers) {
    for (const [name, client] of Object.entries(clients)) {
      for (const call of ["unary", "stream"]) {
        const cells = [name, call, place, cors];
        const headers = { "x-case": `${name} ${call}` };
        for (let tried = 0; tried < 2; tried++) {
          const late = new Promise((resolve) => setTimeout(resolve, 3000, "nothing in 3 s"));
          const outcome = client[call](url, headers).catch((error) => client.error(error));
          cells.push(await Promise.race([outcome, late]));
        }
        await report(`| ${cells.join(" | ")} |`);
      }
    }
  }
  await report(null);
}
run();

// Exchanges the link's code, or the token that is entered, for a session. The code leaves the address at once.
const problem = document.getElementById("problem");

async function login(body) {
  const answer = await fetch("/login", {
    method: "POST", headers: { "Content-Type": "application/json", "X-JaxRoll": "1" }, body: JSON.stringify(body),
  });
  if (answer.ok) {
    location.replace("/");
    return;
  }
  problem.textContent = (await answer.json().catch(() => ({}))).error || `the server answered ${answer.status}`;
}

const code = new URLSearchParams(location.hash.slice(1)).get("code");
history.replaceState(null, "", "/");
if (code) login({ code });
document.getElementById("enter").disabled = false;
document.getElementById("login").addEventListener("submit", event => {
  event.preventDefault();
  login({ token: document.getElementById("token").value });
});
